from __future__ import annotations

import asyncio
import collections
import itertools
import math
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from umbra.runtime import errors
from umbra.runtime.errors import (
    ActorNotFound,
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    RemoteError,
    UmbraError,
)
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.loop_socket import SILENCE_LIMIT_S, LoopSocket, Outbox
from umbra.runtime.rpc.wire import (
    CALL,
    CANCEL,
    END,
    ERROR,
    HELLO,
    ITEM,
    PING,
    REFUSED,
    RESULT,
    WELCOME,
    ActorRef,
    BadEnvelope,
    Decoder,
    Encoder,
    Frame,
    check_envelope,
)

# Interval of reconnects while a peer starts: shorter burns CPU, longer delays start-up.
_RECONNECT_INTERVAL_MS: Final = 10
# Refused attempts to connect after which an actor counts as lost: its address is announced only
# once it listens. A single refusal may be a full backlog; each attempt adds a reconnect interval.
_MAX_REFUSALS: Final = 5
_MONITORED: Final = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECT_RETRIED
)


class ItemStream:
    """Items of one streaming call that have arrived and were not taken yet."""

    __slots__ = ("arrived", "ended", "error", "items")

    def __init__(self) -> None:
        self.items: collections.deque[Any] = collections.deque()
        self.arrived = asyncio.Event()
        self.ended = False
        self.error: UmbraError | None = None


class Connection:
    """One DEALER to one incarnation of an actor: first opening, then open, then lost forever. Calls
    are sent only while it is open (the actor has sent WELCOME), so a call that waits in vain for
    its peer has never been sent."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        ref: ActorRef,
        endpoint: str,
        keys: CurveKeys | None,
        awaits_start: bool,
    ) -> None:
        self.ref = ref
        self._endpoint = endpoint
        self.is_open = False
        self.ended = asyncio.Event()  # set once it is lost
        self.idempotent: frozenset[str] = frozenset()
        self._loop = asyncio.get_running_loop()
        self._call_ids = itertools.count(1)
        self._calls: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle]] = {}
        self._begun: dict[int, tuple[str, float]] = {}  # method and loop time of calls and streams
        self._streams: dict[int, ItemStream] = {}
        self._decoder = Decoder()
        self._settled = asyncio.Event()
        self._error: UmbraError | None = None
        self._num_refusals_left = math.inf if awaits_start else _MAX_REFUSALS
        socket = _dealer(context, keys if endpoint.startswith("tcp://") else None)
        monitor = socket.get_monitor_socket(_MONITORED)
        self._monitor = LoopSocket(monitor, self._on_monitor_event, sender="the socket's monitor")
        self._socket = LoopSocket(socket, self._on_message, sender=str(ref))
        self._socket.prepare_for(endpoint)
        self.outbox = Outbox(self._socket.send, Encoder())
        socket.connect(endpoint)
        self.outbox.put((HELLO,))

    async def wait_open(self) -> None:
        """Raises its final error, `ConnectionLost` or `MailboxClosed`, if it never opens."""
        await self._settled.wait()
        if self._error is not None:
            raise _copy(self._error)

    def begin_call(
        self, method: str, args: tuple[object, ...], kwargs: dict[str, object], timeout_s: float
    ) -> tuple[int, asyncio.Future[Any]]:
        """Sends a call. Its future gets the outcome; `end_call` must always follow."""
        call_id = next(self._call_ids)
        timeout_ms = math.ceil(timeout_s * 1000)
        self.outbox.put((CALL, call_id, self.ref.incarnation, method, args, kwargs, timeout_ms, 0))
        future = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, _expire, future, self.ref, method, timeout_s)
        self._calls[call_id] = (future, timer)
        self._begun[call_id] = method, self._loop.time()
        return call_id, future

    def end_call(self, call_id: int) -> None:
        """Cancels the call at the callee, unless it was answered."""
        self._begun.pop(call_id, None)
        pending = self._calls.pop(call_id, None)
        if pending is not None:
            pending[1].cancel()
            self.outbox.put((CANCEL, call_id))

    @property
    def lost(self) -> bool:
        return self.ended.is_set()

    def next_call_id(self) -> int:
        return next(self._call_ids)

    def open_stream(self, call_id: int, method: str) -> ItemStream:
        stream = self._streams[call_id] = ItemStream()
        self._begun[call_id] = method, self._loop.time()
        return stream

    def forget_stream(self, call_id: int) -> None:
        self._begun.pop(call_id, None)
        self._streams.pop(call_id, None)

    def pending(self) -> list[tuple[float, str]]:
        """The age in seconds of each call without an outcome, and of each open stream."""
        now = self._loop.time()
        kinds = {call_id: "follows" for call_id in self._streams}
        return [
            (now - begun, f"{kinds.get(call_id, 'waits for')} {self.ref}.{method}")
            for call_id, (method, begun) in self._begun.items()
        ]

    def close(self, error: UmbraError) -> None:
        """Fails pending calls and releases the socket; idempotent."""
        if self.lost:
            return
        self.is_open = False
        self._error = error
        self._settled.set()
        self.ended.set()
        calls, self._calls = self._calls, {}
        streams, self._streams = self._streams, {}
        for future, timer in calls.values():
            timer.cancel()
            if not future.done():
                future.set_exception(_copy(error))
        for stream in streams.values():
            if not stream.ended and stream.error is None:
                stream.error = _copy(error)
                stream.arrived.set()
        self.outbox.flush()
        self._socket.raw.disable_monitor()
        self._monitor.close()
        self._socket.close(linger_ms=100)

    def _on_monitor_event(self, frames: list[Frame]) -> None:
        if self.lost:
            return
        event = parse_monitor_message([bytes(frame) for frame in frames])["event"]
        if event & zmq.EVENT_CONNECT_RETRIED:
            self._num_refusals_left -= 1
            if self._num_refusals_left <= 0:
                self.close(ConnectionLost(f"{self.ref} is gone: nothing listens at its address"))
        elif event & zmq.EVENT_DISCONNECTED:
            # It may have answered before it disconnected.
            self._socket.drain_remaining()
            how = f"{self.ref} went away before it answered"
            if self._endpoint.startswith("tcp://"):
                how += f", or its host was silent for {SILENCE_LIMIT_S:g} s"
            self.close(ConnectionLost(how))
        elif event & zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.close(ConnectionLost(f"{self.ref} refused this job's key"))

    def _on_message(self, frames: list[Frame]) -> None:
        try:
            for raw in self._decoder.decode(frames[0], frames[1:]):
                self._on_envelope(check_envelope(raw))
        except BadEnvelope as error:
            if error.kind in (RESULT, ITEM, ERROR, REFUSED):
                self._settle(error.call_id, error=ProtocolError(f"{self.ref}: {error}"))
            raise

    def _on_envelope(self, envelope: list[Any]) -> None:
        kind = envelope[0]
        if kind == RESULT:
            self._settle(envelope[1], value=envelope[2])
        elif kind == ITEM:
            stream = self._streams.get(envelope[1])
            if stream is not None:
                stream.items.append(envelope[2])
                stream.arrived.set()
        elif kind == END:
            stream = self._streams.get(envelope[1])
            if stream is not None:
                stream.ended = True
                stream.arrived.set()
        elif kind == ERROR:
            self._settle(envelope[1], error=_revive(RemoteError(*envelope[2:])))
        elif kind == REFUSED:
            self._settle(envelope[1], error=ActorNotFound(f"{self.ref} refused: {envelope[2]}"))
        elif kind == WELCOME:
            self.idempotent = frozenset(envelope[2])
            self.is_open = not self.lost
            self._settled.set()
        elif kind != PING:
            raise ProtocolError(f"an actor cannot send envelope kind {kind}")

    def _settle(self, call_id: int, value: Any = None, error: UmbraError | None = None) -> None:
        pending = self._calls.pop(call_id, None)
        if pending is not None:
            future, timer = pending
            timer.cancel()
            if not future.done():
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
            return
        stream = self._streams.get(call_id)
        if stream is not None:
            if error is None:
                error = ProtocolError("a plain result for a streaming call: not a generator")
            stream.error = error
            stream.arrived.set()


def _revive(remote: RemoteError) -> UmbraError:
    """Turns a remote error into umbra's own class if it is one, raised from the remote error."""
    module, _, name = remote.remote_type.rpartition(".")
    kind = getattr(errors, name, None) if module == errors.__name__ else None
    if not (isinstance(kind, type) and issubclass(kind, UmbraError)) or kind is RemoteError:
        return remote
    error = kind(remote.remote_message)
    error.__cause__ = remote
    return error


def _copy(error: UmbraError) -> UmbraError:
    """A copy per task: one exception raised in several tasks would collect all their tracebacks."""
    return type(error)(*error.args)


def _dealer(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None) -> zmq.Socket[bytes]:
    # Not IMMEDIATE: with it libzmq 4.3.5 drops answers that have arrived but were not read when the
    # peer disconnects. Nothing but HELLO is sent before the peer is connected.
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.reconnect_ivl = _RECONNECT_INTERVAL_MS
    if keys is not None:
        keys.secure_client(socket)
    return socket


def _expire(future: asyncio.Future[Any], ref: ActorRef, method: str, timeout_s: float) -> None:
    if not future.done():
        message = f"{ref}.{method} did not answer in {timeout_s:.3g} s"
        future.set_exception(DeadlineExceeded(message))
