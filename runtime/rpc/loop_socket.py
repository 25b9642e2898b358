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
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from umbra.runtime.rpc.dropped_messages import DroppedMessages
from umbra.runtime.rpc.tcp_endpoint import is_ipv6
from umbra.runtime.rpc.wire import FRAME_MIN_NBYTES, Frame

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
