"""One named actor under supervision, from its first start to its final end.

    STARTING ──announced──▶ RUNNING ──ended──▶ (policy) ──▶ STARTING ...
        ├──── killed from outside ───────────────▲ └─stops trying─▶ FAILED
        └──── first start fails by itself ────────────────────────────▲
    STARTING or RUNNING ──restart()──▶ STARTING, with the next process
    any ──stop()──▶ STOPPED

Every end except those by `stop()` and `restart()` is a failure, whatever the exit status. While the
whole job is being stopped (`JobStop`), engines are not started, but the actors
that a checkpoint needs are.

`has_run` is true once the actor has served. `ended` is set once it has ended for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, Final

import msgpack

from umbra.runtime.actor.actor_spec import ActorSpec, DeclareFailed, RestartTracker
from umbra.runtime.actor.heartbeat import Watchdog
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.cluster.environment import ACTOR_VARIABLE, without_rank
from umbra.runtime.cluster.gpu_shortage import GpuShortages, read_gpu_memory
from umbra.runtime.cluster.run_events import EventKind
from umbra.runtime.errors import ActorDied, DeadlineExceeded, UmbraError
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.process.descendants import ProcessTree, is_dying, process_stat
from umbra.runtime.process.nvml import gpu_memory_released
from umbra.runtime.process.orphans import end_orphans
from umbra.runtime.process.process_end import ExitStatus
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import to_wire
from umbra.runtime.tracing.spans import instant, span
from umbra.runtime.waiting import first_of

# A dead actor's children may take this long to end. Without a limit, a child that hangs in a driver
# would hold up the restart forever; the supervisor's periodic check takes over.
_ORPHAN_DEADLINE_S: Final = 10.0
# A dead engine's GPU memory may take this long to be free. A longer limit holds up a restart that
# might work; a shorter one starts engines that run out of memory.
_GPU_DEADLINE_S: Final = 30.0
# From a lost connection to the end of its process, beyond the actor's own grace. A longer limit
# holds a caller whose connection alone broke; a shorter one returns the address of a dying process.
_LOST_LIMIT_S: Final = 1.0
# Lines searched for a lack of GPU memory; the tracebacks of an engine's processes follow it.
_MAX_LOG_LINES: Final = 2000
# From a child's end to the end of its pipe, if nobody else holds the pipe.
_OUTCOME_LIMIT_S: Final = 0.2


class ActorState(StrEnum):
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


@dataclasses.dataclass(slots=True)
class _Process:
    """The process of one incarnation."""

    child: ChildProcess | None = None  # from its start until it is being ended
    tree_pids: Sequence[int] = ()  # when last checked
    kill_reason: str = ""
    was_killed: bool = False  # from outside, before it was ready
    is_replaced: bool = False  # it was ended for `restart`
    # It got a stop signal; whether the whole job did is not known yet.
    got_signal: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class SupervisedActor:
    """Owns the actor's process. `run` lives until the actor has ended for good.

    Args:
        num_earlier: incarnations of earlier actors of this name.
        describe_gpu_memory: tells which processes hold how much.
        explain_late: returns text for the error of a first start that is late, before the process
            is killed.
    """

    def __init__(
        self,
        spec: ActorSpec,
        context: NodeContext,
        on_change: Callable[[SupervisedActor], None],
        num_earlier: int = 0,
        may_start: asyncio.Event | None = None,
        describe_gpu_memory: Callable[[], Awaitable[str]] = read_gpu_memory,
        explain_late: Callable[[str], Awaitable[str]] | None = None,
    ) -> None:
        self.spec = spec
        self.state = ActorState.STARTING
        self.incarnation = num_earlier
        self.ref: ActorRef | None = None
        self.pid = 0
        self.failure = ""
        self.has_run = False
        self.has_process = False
        self.ended = asyncio.Event()
        self._context, self._node = context, context.node
        self._on_change = on_change
        self._num_earlier = num_earlier
        self._may_start = may_start
        self._shortages = GpuShortages(describe_gpu_memory)
        self._explain_late = explain_late
        self._stop = asyncio.Event()
        self._restart_requested = asyncio.Event()  # until the next process starts
        self._changed = asyncio.Condition()
        self._process = _Process()  # the last one

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def is_running(self) -> bool:
        """Whether it serves, and was not asked to end."""
        return self.state == ActorState.RUNNING and not self.is_stopping

    @property
    def num_restarts(self) -> int:
        return max(0, self.incarnation - self._num_earlier - 1)

    def stop(self) -> None:
        """Asks for the final end: SIGTERM, grace, SIGKILL. `run` returns afterwards."""
        self._stop.set()

    async def restart(self, timeout_s: float) -> ActorRef:
        """Replaces the process as `stop` ends it, even while it starts, and waits until the next
        one serves. The restart policy does not count this. Raises ActorDied if it has ended for
        good, DeadlineExceeded if it is late; the restart continues."""
        replaced = self.incarnation
        self._restart_requested.set()
        final = (ActorState.STOPPED, ActorState.FAILED)

        def is_settled() -> bool:
            is_next = self.state == ActorState.RUNNING and self.incarnation > replaced
            return is_next or self.state in final

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(is_settled)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.spec.name} was not restarted within {timeout_s:.3g} s"
            ) from None
        return self._live_ref()

    def kill(self, reason: str) -> None:
        """SIGKILLs this incarnation; the restart policy decides what follows. The first reason
        counts, behind the process's kernel state, such as stopped by a signal. It is ignored if the
        process is ending by itself: a broken call is then not the cause. Idempotent."""
        process, child = self._process, self._process.child
        if child is not None and not child.has_ended():
            stat = process_stat(child.pid)
            if stat is not None and not stat.is_ending:
                process.kill_reason = process.kill_reason or _with_state(child.pid, reason)
            child.kill()

    def wait_for(self, may_start: asyncio.Event) -> None:
        former, self._may_start = self._may_start, may_start
        if former is not None:
            former.set()  # whoever waits for it looks at the new one

    async def failed_to_wake(self) -> None:
        await self._shortages.failed_to_wake()

    def woke(self) -> None:
        self._shortages.woke()

    def signalled(self, incarnation: int) -> bool:
        """Takes the actor's report of a stop signal; returns whether umbra sent it, so that
        the actor ends."""
        if incarnation != self.incarnation or self._stop.is_set() or self._process.child is None:
            return True
        self._process.got_signal.set()
        return False

    async def wait_running(self, timeout_s: float, lost_incarnation: int = 0) -> ActorRef:
        """The live incarnation; `lost_incarnation` only if it turns out to be alive, because
        callers may notice an end, or cause one, before it is reaped. Raises ActorDied with the last
        log lines if it has ended for good, or DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                if lost_incarnation == self.incarnation or self._is_dying:
                    await await_end_of_lost(self._changed, lambda: self.state, self.spec.grace_s)
                await self._changed.wait_for(lambda: self.state != ActorState.STARTING)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.spec.name} was not ready in {timeout_s:.3g} s") from None
        return self._live_ref()

    def _live_ref(self) -> ActorRef:
        if self.state != ActorState.RUNNING or self.ref is None:
            raise ActorDied(self.failure or f"{self.spec.name} was stopped")
        return self.ref

    @property
    def _is_dying(self) -> bool:
        return self.state == ActorState.RUNNING and is_dying(self.pid)

    async def run(self) -> None:
        tracker = RestartTracker(self.spec.restart)
        while True:
            await self._await_leave()
            await self._await_job_stop()
            if self._stop.is_set():
                break
            self._restart_requested.clear()
            self.incarnation += 1
            self.has_process = True
            try:
                status, how = await self._run_incarnation()
            except TimeoutError:
                label = f"{self.spec.name}#{self.incarnation} (pid {self.pid})"
                await self._end(
                    ActorState.FAILED,
                    f"{label} was killed but does not end: it hangs in a driver or file system",
                )
                return
            self.has_process = False
            if self._process.got_signal.is_set():
                await self._context.job_stop.settle(self._stop)
            await self._await_job_stop()
            if self._stop.is_set():
                break
            if self._process.is_replaced:
                label = f"{self.spec.name}#{self.incarnation}"
                self._note(f"{label} has ended: restarting it, as asked", "restart")
                self._on_change(self)
                continue
            if not self.has_run and not self._process.was_killed:
                await self._end(ActorState.FAILED, how)  # it would fail again
                return
            if self._shortages.is_final:
                await self._end(ActorState.FAILED, how)
                return
            decision = tracker.observe(status, time.monotonic())
            if isinstance(decision, DeclareFailed):
                adds_information = decision.reason != str(status)
                await self._end(
                    ActorState.FAILED, f"{how}\n{decision.reason}" if adds_information else how
                )
                return
            first_line = how.splitlines()[0].removesuffix(".")
            self._note(f"{first_line}; restarting it in {decision.delay_s:.2g} s", "restart")
            self._on_change(self)  # the process has ended: pools that share its memory wait for it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(decision.delay_s):
                    await first_of(self._stop, self._restart_requested)
        await self._end(ActorState.STOPPED, f"{self.spec.name} was stopped")

    def _note(self, text: str, kind: EventKind) -> None:
        self._context.note(text, kind, self.spec.name)

    async def _await_leave(self) -> None:
        while (gate := self._may_start) is not None and not self._stop.is_set():
            if gate.is_set():
                return
            await first_of(gate, self._stop)

    async def _await_job_stop(self) -> None:
        """Engines wait for the end of a job's stop, because nothing is generated any more."""
        if self.spec.role == "engine":
            await self._context.job_stop.outlast(self._stop)

    async def _run_incarnation(self) -> tuple[ExitStatus, str]:
        """Runs one process from spawn to reaped; describes its end, with the last log lines."""
        self._process = process = _Process()
        label = f"{self.spec.name}#{self.incarnation}"
        log_path = self._node.log_dir / f"{self.spec.name}.log"
        host = [sys.executable, "-m", "umbra.runtime.actor.actor_host"]
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            child = ChildProcess.spawn(
                label,
                [*host, str(write_fd), label, str(log_path)],
                env=self._environment(label),
                log_path=log_path,
                stdin_payload=self._host_config(),
                pass_fds=(write_fd,),
                binds_itself=True,
            )
        except UmbraError as error:
            os.close(read_fd)
            return ExitStatus(None), f"{label} could not be started: {error}"
        finally:
            os.close(write_fd)
        async with child:
            process.child, self.pid, process.tree_pids = child, child.pid, [child.pid]
            with span("start", self.spec.name, incarnation=self.incarnation, pid=child.pid):
                start_error = await self._await_announcement(read_fd, child)
            # Before SIGTERM: a start that takes too long is its own fault.
            process.was_killed = child.status is not None and child.status.is_from_outside
            if not start_error:
                self.has_run = True
                self._shortages.started()
                await self._enter(ActorState.RUNNING)
                await self._watch(child)
            if child.status is not None and child.status.stop_signal is not None:
                process.got_signal.set()
            process.is_replaced = self._restart_requested.is_set() and not is_dying(child.pid)
            process.child = None  # later reports of lost connections name no cause of its end
            status = await child.terminate(self.spec.grace_s)
        if self.state == ActorState.RUNNING:
            await self._enter(ActorState.STARTING)  # or the end: `run` decides once memory is free
        how = self._describe_end(label, child, status)
        instant("end", self.spec.name, incarnation=self.incarnation, how=how.splitlines()[0])
        await self._await_free_memory(label)
        if process.is_replaced:
            return status, how
        if start_error:
            how = f"{label} failed to start: {process.kill_reason or start_error}"
        text = f"{how}\n{child.log_tail(_MAX_LOG_LINES)}"
        if why := await self._shortages.explain_end(text, is_start=bool(start_error)):
            how = f"{label} has {why}\n{how}"
        return status, how

    def _describe_end(self, label: str, child: ChildProcess, status: ExitStatus) -> str:
        how = child.describe_end()
        if self.spec.role == "engine" and not status.signal_name:
            how += child.describe_errors()
        if self._process.kill_reason and status.signal_name == "SIGKILL":
            how = f"{label} was killed: {self._process.kill_reason}\n{how}"
        return how

    async def _await_free_memory(self, label: str) -> None:
        """Waits until its descendants have ended and its GPUs have memory for its successor."""
        await end_orphans(deadline_s=_ORPHAN_DEADLINE_S)
        if self.spec.role == "engine":
            problem = await gpu_memory_released(
                self._process.tree_pids, self.spec.gpus, deadline_s=_GPU_DEADLINE_S, stop=self._stop
            )
            if problem:
                self._note(f"{label}: {problem}; the next one may run out of memory", "fault")

    async def _await_announcement(self, read_fd: int, child: ChildProcess) -> str:
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                outcome = await self._read_outcome(read_fd, child)
        except TimeoutError:
            late = f"not ready within start_timeout_s = {self.spec.start_timeout_s:g}"
            if self.spec.role == "engine":
                late += " (pool.sync_timeout_s)"
            late = _with_state(child.pid, late)
            text = f"{late}; last output:\n{child.log_tail() or '(none)'}"
            if self._explain_late is not None and not self.has_run:
                text += await self._explain_late(f"{self.spec.name}: {late}")
            return text
        if outcome is None:
            if self._stop.is_set() or self._restart_requested.is_set():
                return "it was stopped"
            return child.describe_end()
        if "error" in outcome:
            # An engine's own error refers to the output of its processes.
            more = child.describe_errors() if outcome["error"] == "EngineError" else ""
            text = f"{outcome['error']}: {outcome['message']}\n{outcome['traceback']}"
            return f"{text.rstrip()}{more}"
        self.ref = dataclasses.replace(self._make_ref(), tcp_endpoint=outcome["tcp_endpoint"])
        return ""

    async def _read_outcome(self, read_fd: int, child: ChildProcess) -> dict[str, Any] | None:
        """Reads the child's announcement; None if it ended, or the actor must stop, before. The
        pipe's end proves nothing: a process that the constructor forked may hold it open."""
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(_read_object(read_fd))
            ended = tasks.create_task(child.wait())
            stopped = tasks.create_task(first_of(self._stop, self._restart_requested))
            waiting = (reading, ended, stopped)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                # Its outcome may still be on its way through the pipe.
                await asyncio.wait((reading,), timeout=_OUTCOME_LIMIT_S)
            outcome = reading.result() if reading.done() else None
            if outcome is None or "error" in outcome:
                # It ends by itself, and its own end says more than one by our SIGTERM.
                await asyncio.wait(
                    (ended, stopped),
                    timeout=self.spec.grace_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            for task in waiting:
                task.cancel()
            return outcome

    async def _watch(self, child: ChildProcess) -> None:
        watchdog = Watchdog(self._context.sockets, self._heartbeat_endpoint(), child.pid, self.spec)
        async with asyncio.TaskGroup() as tasks:
            verdict = tasks.create_task(watchdog.run())
            ended = tasks.create_task(child.wait())
            is_to_end = tasks.create_task(self._await_stop())
            waiting = (verdict, ended, is_to_end)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            self._process.tree_pids = watchdog.tree.pids
            if verdict.done() and not ended.done():
                self.kill(verdict.result())
            for task in waiting:
                task.cancel()

    async def _await_stop(self) -> None:
        """Waits until this incarnation must stop: umbra asks for it, or it alone got a signal."""
        await first_of(self._stop, self._restart_requested, self._process.got_signal)
        if self._restart_requested.is_set():
            return
        await self._context.job_stop.settle(self._stop)
        await self._context.job_stop.outlast(self._stop)
        self._process.got_signal.clear()

    async def _enter(self, state: ActorState) -> None:
        if state != ActorState.RUNNING:
            self.ref = None
        async with self._changed:
            self.state = state
            self._changed.notify_all()
        self._on_change(self)

    async def _end(self, state: ActorState, how: str) -> None:
        self.failure = how
        await self._enter(state)
        self.ended.set()

    def _make_ref(self) -> ActorRef:
        path = self._node.socket_dir / f"{self.spec.name}.{self.incarnation}"
        return ActorRef(
            name=self.spec.name,
            incarnation=self.incarnation,
            node_id=self._node.node_id,
            ipc_endpoint=f"ipc://{path}",
        )

    def _heartbeat_endpoint(self) -> str:
        return f"{self._make_ref().ipc_endpoint}.hb"

    def _environment(self, label: str) -> dict[str, str]:
        return {**without_rank(os.environ), **self.spec.env, ACTOR_VARIABLE: label}

    def _host_config(self) -> bytes:
        ref = self._make_ref()
        config = {
            "spec": to_wire(self.spec),
            "incarnation": self.incarnation,
            "num_restarts": self.num_restarts,
            "node_id": self._node.node_id,
            "ipc_endpoint": ref.ipc_endpoint,
            "heartbeat": self._heartbeat_endpoint(),
            "tcp_host": self._node.tcp_host,
            "keys": list(self._node.keys),
            "supervisor": {
                field.name: getattr(self._node.supervisor, field.name)
                for field in dataclasses.fields(self._node.supervisor)
            },
            "log_level": self._node.log_level,
            "trace_dir": self._node.trace_dir,
        }
        packed: bytes = msgpack.packb(config)
        return packed


def _with_state(pid: int, reason: str) -> str:
    """The reason for a kill, behind the kernel's state of the process and its descendants."""
    tree = ProcessTree(pid)
    tree.look()
    state = tree.why_stuck()
    return f"{state}: {reason}" if state else reason


async def await_end_of_lost(
    changed: asyncio.Condition, state: Callable[[], ActorState], grace_s: float
) -> None:
    """Waits for the end that a lost connection announces. The caller holds the condition."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s + _LOST_LIMIT_S):
            await changed.wait_for(lambda: state() != ActorState.RUNNING)


async def _read_object(fd: int) -> dict[str, Any] | None:
    """Reads one msgpack map from a pipe without blocking the loop; None at its end. Closes it.

    uvloop's transport of a pipe would close the descriptor twice, and with it one that another
    thread has opened in between, such as a socket of ZeroMQ."""
    loop = asyncio.get_running_loop()
    unpacker = msgpack.Unpacker()
    readable = asyncio.Event()
    os.set_blocking(fd, False)
    loop.add_reader(fd, readable.set)
    try:
        while True:
            await readable.wait()
            readable.clear()
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(fd, 65536)
                if not chunk:
                    return None
                unpacker.feed(chunk)
            for outcome in unpacker:
                found: dict[str, Any] = outcome
                return found
    finally:
        loop.remove_reader(fd)
        os.close(fd)
