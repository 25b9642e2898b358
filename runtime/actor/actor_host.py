"""The main program of an actor's process: `python -m umbra.runtime.actor.actor_host READY_FD`.

Its other arguments, a name and a log path, are for people who look at processes. Standard input
carries one msgpack map (the spec, the endpoints to bind, the job's keys). The outcome of the start
goes to READY_FD as one msgpack map: `{"tcp_endpoint": ...}` or `{"error": type, "message": ...,
"traceback": ...}`. End of file without either means that the process died during the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

import msgpack
import uvloop
import zmq

from umbra.runtime.actor.actor_spec import ActorContext, ActorSpec, make_target, set_actor_context
from umbra.runtime.actor.function_queue import FunctionQueue
from umbra.runtime.actor.heartbeat import HeartbeatResponder, LoopTicker
from umbra.runtime.errors import ActorError, UmbraError
from umbra.runtime.process.child_process import PARENT_PID_VARIABLE
from umbra.runtime.process.cpu_affinity import confine, cores_near
from umbra.runtime.process.orphans import AdoptedChildren, note_own_children
from umbra.runtime.process.prctl import become_subreaper, die_with_parent
from umbra.runtime.process.process_end import STOP_SIGNALS
from umbra.runtime.process.signal_handling import keep_from_forks
from umbra.runtime.process.thread_stacks import answer_stack_requests
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.loop_socket import endpoint_at
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import from_wire
from umbra.runtime.tracing.spans import recording

T = TypeVar("T")

logger = logging.getLogger(__name__)

_REPORT_LIMIT_S: Final = 10.0
"""Time for the supervisor to answer; afterwards the actor presumes it dead, and ends itself."""
_REAP_INTERVAL_S: Final = 1.0
"""A longer interval leaves more ended processes; a shorter one wakes idle actors."""
_FREE_LIMIT_S: Final = 1.0
"""Time for the main thread to return from user code at the end. Longer: user code that hangs delays
the successor. Shorter: code about to return is cut off, exit handlers included."""


class _Host:
    """One actor process, from announcement to shutdown. A stop signal is reported to the
    supervisor. If the supervisor sent it, the actor ends. Otherwise it keeps serving, because ranks
    need it while the whole job stops."""

    def __init__(self, config: dict[str, Any], ready_fd: int) -> None:
        self._spec = from_wire(ActorSpec, config["spec"])
        self._config = config
        self._ready_fd = ready_fd
        keys = config["keys"]
        self._keys = CurveKeys(public=keys[0], secret=keys[1]) if keys else None
        self._announced = False
        self._signalled = asyncio.Event()
        self._stop = asyncio.Event()
        self.signal: signal.Signals | None = None  # the first one received
        self._on_stop: Callable[[], object] = self._stop.set
        self.main_thread = FunctionQueue() if self._spec.frees_main_thread else None

    async def serve(self) -> None:
        starting = asyncio.current_task()
        assert starting is not None
        self._on_stop = starting.cancel
        await self._on_main_thread(self._signal_handling(asyncio.get_running_loop()))
        incarnation: int = self._config["incarnation"]
        async with (
            Client(self._config["node_id"], self._keys) as client,
            contextlib.AsyncExitStack() as stack,
        ):
            supervisor = self._config["supervisor"]
            assert isinstance(supervisor, ActorRef)
            set_actor_context(
                ActorContext(
                    name=self._spec.name,
                    incarnation=incarnation,
                    num_restarts=self._config["num_restarts"],
                    node_id=self._config["node_id"],
                    supervisor=client.handle(supervisor),
                    client=client,
                    main_thread=self.main_thread,
                    tcp_host=self._config["tcp_host"],
                )
            )
            gc.disable()  # looking for garbage among a library's modules takes a sixth of the time
            spec = self._spec
            target = await self._on_main_thread(
                lambda: make_target(spec.target, spec.kwargs, spec.kwarg_settings)
            )
            gc.freeze()  # they never become garbage
            gc.enable()
            if hasattr(target, "__aenter__"):
                await stack.enter_async_context(target)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            # Not `term`, which would wait forever for a socket whose server never ran.
            stack.callback(context.destroy, linger=0)
            server = ActorServer([target], incarnation, client)
            tcp_endpoint = self._bind(server, context, stack)
            ticker = LoopTicker(self._progress_of(target))
            stack.enter_context(
                HeartbeatResponder(context, self._config["heartbeat"], incarnation, ticker)
            )
            self._on_stop = self._signalled.set
            self._announce({"tcp_endpoint": tcp_endpoint})
            await self._run(server, ticker, target, client.handle(supervisor))

    def _progress_of(self, target: object) -> Callable[[], object] | None:
        return getattr(target, "progress", None) if self._spec.stall_limit_s else None

    def _bind(
        self,
        server: ActorServer,
        context: zmq.Context[zmq.Socket[bytes]],
        stack: contextlib.AsyncExitStack,
    ) -> str:
        server.bind(context.socket(zmq.ROUTER), self._config["ipc_endpoint"])
        if self._keys is None or not self._config["tcp_host"]:
            return ""
        stack.callback(self._keys.admit_only_job(context).stop)
        socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._keys.secure_server(socket)
        return server.bind(socket, endpoint_at(self._config["tcp_host"], "*"))

    async def _run(
        self, server: ActorServer, ticker: LoopTicker, target: object, supervisor: Handle
    ) -> None:
        """Runs until the actor must end. Raises ActorError if one of its tasks was cancelled."""
        run: Any = getattr(target, "run", None)
        async with asyncio.TaskGroup() as tasks:
            stop = tasks.create_task(self._stop.wait())
            reporting = tasks.create_task(self._report_signals(supervisor))
            running = {stop, tasks.create_task(server.run()), tasks.create_task(ticker.run())}
            running.add(tasks.create_task(_reap_adopted()))
            if run is not None:
                running.add(tasks.create_task(_as_coroutine(run())))
            while not self._stop.is_set():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if any(task.cancelled() for task in done):
                    raise ActorError(
                        "a task that serves this actor was cancelled: cancel no tasks but your own"
                    )
            logger.info("stopping")
            for task in (reporting, *running):
                task.cancel()

    async def _report_signals(self, supervisor: Handle) -> None:
        is_to_end = False
        while not is_to_end:
            await self._signalled.wait()
            self._signalled.clear()
            is_to_end = True
            with contextlib.suppress(UmbraError):
                is_to_end = await supervisor.call(
                    "signalled",
                    self._spec.name,
                    self._config["incarnation"],
                    timeout_s=_REPORT_LIMIT_S,
                )
        self._stop.set()

    async def _on_main_thread(self, function: Callable[[], T]) -> T:
        """Calls `function` there; the actor's loop waits, or has that thread."""
        if self.main_thread is None:
            return function()
        return await asyncio.wrap_future(self.main_thread.put(function))

    def _signal_handling(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so does the process
                loop.call_soon_threadsafe(self._observe, signal.Signals(number))

        def install() -> None:
            for number in STOP_SIGNALS:
                signal.signal(number, handle)
            keep_from_forks(*STOP_SIGNALS)

        return install

    def _observe(self, number: signal.Signals) -> None:
        logger.info("received %s", number.name)
        self.signal = self.signal or number
        self._on_stop()

    def _announce(self, outcome: dict[str, Any]) -> None:
        if not self._announced:
            self._announced = True
            os.write(self._ready_fd, msgpack.packb(outcome))
            os.close(self._ready_fd)

    def announce_failure(self, error: BaseException) -> None:
        self._announce(
            {
                "error": type(error).__qualname__,
                "message": str(error),
                # umbra's own errors explain themselves in the message.
                "traceback": ""
                if isinstance(error, UmbraError)
                else traceback.format_exc()[-16_000:],
            }
        )


async def _reap_adopted() -> None:
    children = AdoptedChildren()
    while True:
        await asyncio.sleep(_REAP_INTERVAL_S)
        children.reap()


async def _as_coroutine(awaitable: Coroutine[Any, Any, None]) -> None:
    await awaitable


def _unpack_config(data: bytes) -> dict[str, Any]:
    config: dict[str, Any] = msgpack.unpackb(data)
    config["supervisor"] = ActorRef(**config["supervisor"])
    return config


def main() -> None:
    """Exits with 128 + a stop signal's number, or with 1 after a logged error."""
    die_with_parent(int(os.environ[PARENT_PID_VARIABLE]))
    become_subreaper()
    note_own_children()
    answer_stack_requests()
    ready_fd = int(sys.argv[1])
    config = _unpack_config(sys.stdin.buffer.read())
    os.set_inheritable(ready_fd, False)
    if gpus := config["spec"]["gpus"]:
        confine(*cores_near([gpus]))  # before libraries see how many cores there are
    logging.basicConfig(
        level=config["log_level"],
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    sys.path[:0] = config["spec"]["sys_path"]
    host = _Host(config, ready_fd)
    if host.main_thread is None:
        status = _serve_recorded(host, config)
    else:
        status = _serve_beside(host.main_thread, lambda: _serve_recorded(host, config))
    if host.signal is None and config["spec"]["role"] == "engine":
        _leave_at_once(status)
    sys.exit(status)


def _serve_beside(main_thread: FunctionQueue, serve: Callable[[], int]) -> int:
    status = 1

    def serve_and_stop() -> None:
        nonlocal status
        try:
            status = serve()
        finally:
            main_thread.stop()
            if not main_thread.has_stopped.wait(_FREE_LIMIT_S):
                _leave_at_once(status)

    thread = threading.Thread(target=serve_and_stop, name="actor", daemon=True)
    thread.start()
    main_thread.serve()
    thread.join()
    return status


def _serve_recorded(host: _Host, config: dict[str, Any]) -> int:
    with recording(config["trace_dir"], config["node_id"], config["spec"]["name"]):
        return _serve(host)


def _serve(host: _Host) -> int:
    """Serves until the actor ends, and returns the exit status. The log has the reason."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(host.serve())
    except asyncio.CancelledError:
        if host.signal is None:
            logger.exception("the actor's main task was cancelled: cancel no tasks but your own")
            return 1
        logger.info("stopped by %s before it was ready", host.signal.name)
    except SystemExit as end:
        logger.exception("the actor's code called sys.exit()")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        host.announce_failure(error)
        logger.exception("the actor died")
        return 1
    assert host.signal is not None  # nothing else ends an actor without an error
    return 128 + host.signal


def _leave_at_once(status: int) -> NoReturn:
    """Skips the interpreter's own shutdown, which takes seconds with an engine's libraries."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
