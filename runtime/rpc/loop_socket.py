"""A ZMQ socket driven by the running event loop through plain callbacks.

`zmq.asyncio` wraps every receive in a future; here a readable socket is drained straight into
`on_message`, and messages queued in one loop iteration leave together, for the sake of tens of
thousands of small calls a second.

The socket applies no backpressure: its high-water marks are 0 (ZMQ drops silently at them), and
callers limit their messages (deadlines, credits).
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from umbra.runtime.errors import ProtocolError
from umbra.runtime.rpc.wire import FRAME_MIN_NBYTES, Encoder, Frame

logger = logging.getLogger(__name__)

# Messages handled before the loop runs other work: more starves timers, fewer costs wake-ups.
_DRAIN_LIMIT: Final = 256
# Largest single ZMQ frame taken from a peer; a weight tensor never travels here.
_MAX_FRAME_NBYTES: Final = 1 << 31

# A tcp connection is probed this often, and is lost after that silence. More often wakes idle
# processes; a shorter silence loses connections that a busy network delays.
_PROBE_INTERVAL_S: Final = 2.0
SILENCE_LIMIT_S: Final = 10.0

_SEND_MORE: Final = zmq.NOBLOCK | zmq.SNDMORE

OnMessage = Callable[[list[Frame]], None]

REPORT_INTERVAL_S: Final = 10.0
"""Shortest time between two lines about one socket. Shorter lets a peer that sends only garbage
fill the disk; longer delays the report that it still does."""

# A batch this large goes out at once: waiting longer saves nothing and delays its first call.
_FLUSH_NBYTES: Final = 64 * 1024

_SCHEME = "tcp://"


class LoopSocket:
    """Owns one ZMQ socket; the loop that created it is its only reader and writer. `close()` is
    immediate: unsent messages are dropped (linger 0), unless `linger_ms` is set."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: OnMessage,
        *,
        sender: str,
        delivers: bool = True,
    ) -> None:
        """`on_message` may raise ProtocolError for a malformed message, which is then dropped."""
        self._socket = socket
        # A ROUTER's messages begin with the peer's identity.
        self._num_small_frames = 2 if socket.type == zmq.ROUTER else 1
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._dropped = DroppedMessages(sender, self._loop.call_later)
        self._unsent: collections.deque[Sequence[Frame]] = collections.deque()
        self._closed = False
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.linger = 0
        socket.maxmsgsize = _MAX_FRAME_NBYTES
        self._fd = socket.fileno()
        self._drain_scheduled = False
        self._delivers = False
        if delivers:
            self.deliver()

    @property
    def raw(self) -> zmq.Socket[bytes]:
        return self._socket

    def prepare_for(self, endpoint: str) -> None:
        """Called before the socket is bound or connected. Notices lost hosts.

        Only a tcp connection is probed: its other host may be gone without a word. The kernel
        closes a local one when the process at its other end ends, and no earlier; a process stopped
        by a signal is not lost, and answers once it continues.
        """
        if is_ipv6(endpoint):  # without need it would be an error where the kernel has no IPv6
            self._socket.ipv6 = True
        if endpoint.startswith("tcp://"):
            self._socket.heartbeat_ivl = int(_PROBE_INTERVAL_S * 1000)
            self._socket.heartbeat_timeout = int(SILENCE_LIMIT_S * 1000)

    def deliver(self) -> None:
        """Begins to deliver messages; until then they wait in the socket."""
        self._delivers = True
        self._loop.add_reader(self._fd, self._drain)
        # The descriptor signals nothing until a first read has found the socket empty.
        self._drain_scheduled = True
        self._loop.call_soon(self._drain)

    def send(self, frames: Sequence[Frame]) -> None:
        """Sends in order, once a peer is connected. Raises EHOSTUNREACH without a ROUTER's peer."""
        if self._closed:
            return
        if self._unsent:
            self._unsent.append(frames)
            return
        try:
            if not self._try_send(frames):
                self._unsent.append(frames)
        finally:
            # A send may consume the edge that signals input, also one that fails.
            self._schedule_drain()

    def _try_send(self, frames: Sequence[Frame]) -> bool:
        try:
            # ZMQ accepts a whole message or none of it: only the first frame can be refused.
            for frame in frames[:-1]:
                self._socket.send(frame, _SEND_MORE, copy=len(frame) < FRAME_MIN_NBYTES)
            frame = frames[-1]
            self._socket.send(frame, zmq.NOBLOCK, copy=len(frame) < FRAME_MIN_NBYTES)
        except zmq.Again:
            return False
        return True

    def _schedule_drain(self) -> None:
        if self._delivers and not self._drain_scheduled:
            events = self._socket.getsockopt(zmq.EVENTS)
            assert isinstance(events, int)
            if events & zmq.POLLIN or (self._unsent and events & zmq.POLLOUT):
                self._drain_scheduled = True
                self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        for _ in range(_DRAIN_LIMIT):
            if self._closed:
                return
            if not self._handle_one():
                break
        if self._closed:
            return
        while self._unsent and self._try_send(self._unsent[0]):
            self._unsent.popleft()
        self._schedule_drain()

    def drain_remaining(self) -> None:
        """Handles the messages that have arrived, before a lost peer is dropped."""
        while not self._closed and self._handle_one():
            pass

    def _handle_one(self) -> bool:
        try:
            frames = self._receive()
        except zmq.Again:
            return False
        try:
            self._on_message(frames)
        except Exception as error:  # noqa: BLE001 -- propagating would leave input unread
            self._dropped.add(error)
        return True

    def _receive(self) -> list[Frame]:
        """Reads one whole message; frames after the header are views of ZMQ's own memory."""
        socket = self._socket
        frames: list[Frame] = [socket.recv(zmq.NOBLOCK)]
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) < self._num_small_frames:
                frames.append(socket.recv())
            else:
                frames.append(socket.recv(copy=False).buffer)
        return frames

    def close(self, linger_ms: int = 0) -> None:
        if self._closed:
            return
        self._closed = True
        self._dropped.close()
        self._unsent.clear()
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=linger_ms)


class DroppedMessages:
    """Logs dropped messages in few lines, however many there are. The first one is logged at once;
    then, once per interval, the number of new ones and the last."""

    def __init__(
        self, sender: str, call_later: Callable[[float, Callable[[], None]], asyncio.TimerHandle]
    ) -> None:
        self._sender = sender
        self._call_later = call_later
        self._timer: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._num_unreported = 0
        self._last = ""

    def add(self, error: Exception) -> None:
        """Reports one dropped message. Any error but ProtocolError is a bug of the handler. Only
        the error's text is kept: its traceback would keep the message."""
        self._num_dropped += 1
        text = f"{type(error).__name__}: {error}"
        if self._timer is not None:
            self._num_unreported += 1
            self._last = text
            return
        is_bug = not isinstance(error, ProtocolError)
        logger.warning(
            "dropped a message from %s: %s", self._sender, text, exc_info=error if is_bug else None
        )
        self._timer = self._call_later(REPORT_INTERVAL_S, self._on_interval)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._report()

    def _on_interval(self) -> None:
        self._timer = None
        if self._report():
            self._timer = self._call_later(REPORT_INTERVAL_S, self._on_interval)

    def _report(self) -> bool:
        num, self._num_unreported = self._num_unreported, 0
        if num:
            logger.warning(
                "dropped %d more messages from %s, %d in all; the last: %s",
                num, self._sender, self._num_dropped, self._last,
            )  # fmt: skip
        return num > 0


class Outbox:
    """Encodes envelopes for one peer and passes them to `send` in order.

    The first envelope of a loop iteration leaves at once, for latency; those behind it share one
    message at the iteration's end, for throughput. Many peers of one loop may share the encoder,
    whose buffer is as large as the largest value.
    """

    def __init__(self, send: Callable[[Sequence[Frame]], None], encoder: Encoder) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._encoder = encoder
        self._headers: list[bytes] = []
        self._nbytes = 0
        self._flush_scheduled = False

    def put(self, envelope: tuple[Any, ...]) -> None:
        """Queues one envelope. Raises TypeError, ValueError or OverflowError for a value
        without wire form."""
        header, frames = self._encoder.encode(envelope)
        if frames or len(header) >= _FLUSH_NBYTES:
            # Sent alone, so that a batch stays far below the receiver's limit for one header.
            self.flush()
            self._send([header, *frames])
            return
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._end_iteration)
            self._send([header])
            return
        self._headers.append(header)
        self._nbytes += len(header)
        if self._nbytes >= _FLUSH_NBYTES:
            self.flush()

    def _end_iteration(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        if self._headers:
            headers, self._headers, self._nbytes = self._headers, [], 0
            self._send([headers[0] if len(headers) == 1 else b"".join(headers)])


def endpoint_at(host: str, port: int | str) -> str:
    """The endpoint of an address without brackets. Port "*" stands for any free one."""
    return f"{_SCHEME}[{host}]:{port}" if ":" in host else f"{_SCHEME}{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Host, without brackets, and port; ("", "") of none. The scheme may be missing."""
    host, _, port = endpoint.removeprefix(_SCHEME).rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def is_ipv6(endpoint: str) -> bool:
    return endpoint.startswith(f"{_SCHEME}[")
