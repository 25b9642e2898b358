"""Serves one Python object over ROUTER sockets: the receiving half of RPC.

    caller ──CALL──▶ ActorServer ──▶ target.method()
           ◀─RESULT / ITEM… END / ERROR / REFUSED──

A plain `def` runs inline on the loop and must not block. An `async def` runs as a task of the
server's TaskGroup under the caller's deadline. An async generator streams: it is advanced only
while the caller has granted credits. CANCEL, a lost caller and shutdown cancel the task.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from types import AsyncGeneratorType, CoroutineType
from typing import Any, Final, TypeVar, cast

import zmq

from umbra.runtime.errors import ProtocolError, brief
from umbra.runtime.rpc.loop_socket import LoopSocket, Outbox
from umbra.runtime.rpc.rpc_client import DESCRIBE, Client, describe_calls
from umbra.runtime.rpc.wire import (
    CALL,
    CANCEL,
    CREDIT,
    END,
    ERROR,
    HELLO,
    ITEM,
    PING,
    REFUSED,
    RESULT,
    WELCOME,
    BadEnvelope,
    Decoder,
    Encoder,
    Frame,
    check_envelope,
)

logger = logging.getLogger(__name__)

# Interval of checks for callers that vanished while their calls run. A shorter one costs wake-ups.
PEER_CHECK_INTERVAL_S: Final = 1.0
# Idle callers are checked only every so many checks; until then a vanished one costs 1 KB.
_IDLE_PEER_CHECKS: Final = 30
# Concurrent calls of one caller. A caller that has more in flight has a bug.
_MAX_CALLS_PER_PEER: Final = 100_000
_TRACEBACK_MAX_CHARS: Final = 16_000
_OVER: Final = object()  # stands for the end of a stream

F = TypeVar("F", bound=Callable[..., Any])


def idempotent(method: F) -> F:
    """Declares that running the method twice does no harm: it is retried over a reconnect."""
    method.__umbra_idempotent__ = True  # pyright: ignore[reportFunctionMemberAccess]
    return method


class _Running:
    """One call in progress. `begun` and `deadline` are loop times."""

    __slots__ = ("args", "begun", "credit_added", "credits", "deadline", "method", "task")

    def __init__(self, method: str, args: list[Any], credits: int, deadline: float) -> None:
        self.method = method
        self.args = args
        self.begun = asyncio.get_running_loop().time()
        self.credits = credits
        self.deadline = deadline
        self.credit_added = asyncio.Event() if credits else None
        self.task: asyncio.Task[None] | None = None

    @property
    def kind(self) -> str:
        return "answers" if self.credit_added is None else "streams"

    def cancel(self) -> None:
        """The caller no longer waits: there will be no answer."""
        self.deadline = math.inf
        if self.task is not None:
            self.task.cancel()


class _Peer:
    """One connected caller: its outbox and its running calls."""

    __slots__ = ("calls", "identity", "outbox", "socket")

    def __init__(
        self,
        socket: LoopSocket,
        identity: bytes,
        encoder: Encoder,
        lost: Callable[[_Peer], None],
    ) -> None:
        self.socket = socket
        self.identity = identity
        self.calls: dict[int, _Running] = {}

        def send(frames: Any) -> None:
            try:
                socket.send([identity, *frames])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                lost(self)

        self.outbox = Outbox(send, encoder)


class ActorServer:
    """Dispatches calls to `targets`: to their public methods, except `run`. Owns its tasks and
    sockets; lives as long as `run()`. With the process's `client` it answers `DESCRIBE`."""

    def __init__(
        self,
        targets: Sequence[object],
        incarnation: int,
        client: Client | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._methods: dict[str, Callable[..., Any]] = {}
        if client is not None:
            self._methods[DESCRIBE] = lambda: describe_calls(client, self.running_calls())
        for target in targets:
            self._methods |= _public_methods(target)
        self._idempotent = sorted(
            name for name, m in self._methods.items() if hasattr(m, "__umbra_idempotent__")
        )
        self._sockets: list[LoopSocket] = []
        self._peers: dict[tuple[int, bytes], _Peer] = {}
        self._encoder = Encoder()
        self._tasks: asyncio.TaskGroup | None = None

    def bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Binds a ROUTER socket, which the server then owns; returns the real endpoint."""
        decoder = Decoder()
        idx = len(self._sockets)
        socket.router_mandatory = True
        loop_socket = LoopSocket(
            socket,
            lambda frames: self._on_message(idx, decoder, frames),
            sender="a caller",
            delivers=False,
        )
        loop_socket.prepare_for(endpoint)
        self._sockets.append(loop_socket)
        socket.bind(endpoint)
        bound = socket.last_endpoint
        assert isinstance(bound, bytes)
        return bound.decode().rstrip("\0")

    def running_calls(self) -> list[tuple[float, str]]:
        """The age in seconds of each call that has no answer yet, and of each stream."""
        now = asyncio.get_running_loop().time()
        return [
            (now - call.begun, f"{call.kind} {call.method}({', '.join(map(brief, call.args))})")
            for peer in self._peers.values()
            for call in peer.calls.values()
        ]

    async def run(self) -> None:
        """Serves until cancelled; running calls are cancelled with it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for socket in self._sockets:
                    socket.deliver()
                for check in itertools.count(1):
                    await asyncio.sleep(PEER_CHECK_INTERVAL_S)
                    self._check_peers(look_at_idle=check % _IDLE_PEER_CHECKS == 0)
        finally:
            self._tasks = None
            for peer in self._peers.values():
                peer.outbox.flush()
            for socket in self._sockets:
                socket.close(linger_ms=200)

    def _check_peers(self, look_at_idle: bool) -> None:
        """Cancels calls past their deadline, whose callers may be stopped; finds lost callers."""
        now = asyncio.get_running_loop().time()
        for peer in list(self._peers.values()):
            for running in peer.calls.values():
                if running.deadline < now:
                    running.cancel()
            if peer.calls or look_at_idle:
                peer.outbox.put((PING,))

    def _on_message(self, socket_idx: int, decoder: Decoder, frames: list[Frame]) -> None:
        peer = self._peer(socket_idx, bytes(frames[0]))
        try:
            if len(frames) < 2:
                raise ProtocolError("message without a header")
            for raw in decoder.decode(frames[1], frames[2:]):
                self._on_envelope(peer, check_envelope(raw))
        except BadEnvelope as error:
            if error.kind == CALL:
                _put_error(peer.outbox, error.call_id, ProtocolError(str(error)))
            raise

    def _peer(self, socket_idx: int, identity: bytes) -> _Peer:
        peer = self._peers.get((socket_idx, identity))
        if peer is None:
            peer = _Peer(self._sockets[socket_idx], identity, self._encoder, self._on_peer_lost)
            self._peers[(socket_idx, identity)] = peer
        return peer

    def _on_peer_lost(self, peer: _Peer) -> None:
        for key, known in list(self._peers.items()):
            if known is peer:
                del self._peers[key]
        for running in peer.calls.values():
            running.cancel()

    def _on_envelope(self, peer: _Peer, envelope: list[Any]) -> None:
        kind = envelope[0]
        if kind == CALL:
            self._on_call(peer, *envelope[1:])
        elif kind == CANCEL:
            running = peer.calls.get(envelope[1])
            if running is not None:
                running.cancel()
        elif kind == CREDIT:
            running = peer.calls.get(envelope[1])
            if running is not None and running.credit_added is not None:
                running.credits += max(0, envelope[2])
                running.credit_added.set()
        elif kind == HELLO:
            peer.outbox.put((WELCOME, self._incarnation, self._idempotent))
        else:
            raise ProtocolError(f"a caller cannot send envelope kind {kind}")

    def _on_call(
        self,
        peer: _Peer,
        call_id: int,
        incarnation: int,
        name: str,
        args: list[Any],
        kwargs: dict[str, Any],
        timeout_ms: int,
        credits: int,
    ) -> None:
        method = self._methods.get(name)
        refusal = ""
        if incarnation != self._incarnation:
            refusal = (
                f"stale: incarnation {self._incarnation} is here, the call was for {incarnation}"
            )
        elif method is None:
            refusal = f"no method {brief(name)}; there are: {', '.join(sorted(self._methods))}"
        elif self._tasks is None:
            refusal = "the actor is shutting down"
        elif call_id in peer.calls:
            refusal = f"call id {call_id} is running already"
        elif len(peer.calls) >= _MAX_CALLS_PER_PEER:
            refusal = f"{_MAX_CALLS_PER_PEER} calls of this caller are running already"
        if refusal or method is None or self._tasks is None:
            peer.outbox.put((REFUSED, call_id, refusal))
            return
        try:
            outcome = method(*args, **kwargs)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- the caller's
            _put_error(peer.outbox, call_id, error)
            return
        if isinstance(outcome, CoroutineType):
            loop_time = asyncio.get_running_loop().time
            running = _Running(
                name, args, 0, loop_time() + timeout_ms / 1000 if timeout_ms else math.inf
            )
            coroutine = cast("Coroutine[Any, Any, Any]", outcome)
            work = self._finish(peer, call_id, coroutine)
        elif isinstance(outcome, AsyncGeneratorType):
            if credits <= 0:
                _put_error(peer.outbox, call_id, TypeError(f"{name} returns a stream, not a value"))
                return
            running = _Running(name, args, credits, math.inf)
            items = cast("AsyncGenerator[Any, Any]", outcome)
            work = self._stream(peer, call_id, running, items)
        else:
            _put_result(peer.outbox, (RESULT, call_id, outcome), call_id)
            return
        peer.calls[call_id] = running
        running.task = self._tasks.create_task(work)

        def on_done(task: asyncio.Task[None]) -> None:
            del task
            peer.calls.pop(call_id, None)
            if isinstance(outcome, CoroutineType):
                outcome.close()  # it never began if it was cancelled at once

        running.task.add_done_callback(on_done)

    async def _finish(self, peer: _Peer, call_id: int, outcome: Coroutine[Any, Any, Any]) -> None:
        try:
            _put_result(peer.outbox, (RESULT, call_id, await outcome), call_id)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- it is the caller's
            _answer_with(error, peer.outbox, call_id)

    async def _stream(
        self, peer: _Peer, call_id: int, running: _Running, items: AsyncGenerator[Any, Any]
    ) -> None:
        assert running.credit_added is not None
        try:
            while True:
                while running.credits <= 0:
                    running.credit_added.clear()
                    await running.credit_added.wait()
                running.credits -= 1
                item = await anext(items, _OVER)
                if item is _OVER:
                    peer.outbox.put((END, call_id))
                    return
                if not _put_result(peer.outbox, (ITEM, call_id, item), call_id):
                    return
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- it is the caller's
            _answer_with(error, peer.outbox, call_id)
        finally:
            try:
                await items.aclose()
            except Exception:  # the caller has its answer, or needs none any more
                logger.exception("a stream's clean-up failed")


def _answer_with(error: BaseException, outbox: Outbox, call_id: int) -> None:
    """Sends the error of a call's method; raises a cancellation of the call's task again."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    _put_error(outbox, call_id, error)


def _put_result(outbox: Outbox, envelope: tuple[Any, ...], call_id: int) -> bool:
    try:
        outbox.put(envelope)
    except Exception as error:  # noqa: BLE001 -- it has no wire form: the caller gets the error
        _put_error(outbox, call_id, error)
        return False
    return True


def _put_error(outbox: Outbox, call_id: int, error: BaseException) -> None:
    kind = type(error)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 -- user code
        message = "(its message cannot be formatted)"
    text = "".join(traceback.format_exception(error))[-_TRACEBACK_MAX_CHARS:]
    fields = (f"{kind.__module__}.{kind.__qualname__}", message[:_TRACEBACK_MAX_CHARS], text)
    # Text about undecodable file names has lone surrogates, which have no wire form.
    sendable = [field.encode("utf-8", "backslashreplace").decode() for field in fields]
    outbox.put((ERROR, call_id, *sendable))


def _public_methods(target: object) -> dict[str, Callable[..., Any]]:
    """Callable attributes defined by the target's classes, without underscore and `run`."""
    methods: dict[str, Callable[..., Any]] = {}
    for name in dir(type(target)):
        if name.startswith("_") or name == "run":
            continue
        member = inspect.getattr_static(type(target), name)
        if inspect.isfunction(member):
            methods[name] = getattr(target, name)
    return methods
