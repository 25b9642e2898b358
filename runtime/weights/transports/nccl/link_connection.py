from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Final

from umbra.runtime.weights.sync_calls import remaining_s

_MAX_FRAME_NBYTES: Final = 255  # has to fit one byte


class LinkConnection:
    """The TCP connection of a link's two ends. Owns the socket.

    One thread sends and receives, until `deadline`; any thread may interrupt it. Calls raise
    DeadlineExceeded or TimeoutError after the deadline, OSError if the other end is gone, or either
    end interrupted the connection.
    """

    def __init__(self, stream: socket.socket, deadline: float) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = deadline
        self._stream = stream
        self._lock = threading.Lock()  # a descriptor that was closed may be another file's by now

    def send(self, data: bytes | memoryview) -> None:
        self._stream.settimeout(remaining_s(self.deadline))
        self._stream.sendall(data)

    def receive(self, target: memoryview) -> None:
        """Fills `target`, the bytes of a buffer."""
        while target:
            self._stream.settimeout(remaining_s(self.deadline))
            num_received = self._stream.recv_into(target)
            if num_received == 0:
                raise ConnectionResetError("the other end closed the connection")
            target = target[num_received:]

    def send_frame(self, data: bytes) -> None:
        assert len(data) <= _MAX_FRAME_NBYTES, len(data)
        self.send(bytes([len(data)]) + data)

    def receive_frame(self) -> bytes:
        return bytes(self._receive_bytes(self._receive_bytes(1)[0]))

    def interrupt(self) -> None:
        """Ends both ends' waits. Idempotent."""
        with self._lock, suppress(OSError):  # it is closed, or the other end was faster
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Sent data arrives if the receive buffer is empty. Idempotent."""
        with self._lock:
            self._stream.close()

    def _receive_bytes(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        self.receive(memoryview(data))
        return data
