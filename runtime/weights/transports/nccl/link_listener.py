from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Final

from umbra.runtime.weights.transports.nccl.link_connection import LinkConnection
from umbra.runtime.weights.transports.nccl.weight_links import SendingLink

_BACKLOG: Final = 512
# Connections that wait until `serve` is called: one for each other node.
_MAX_UNNAMED: Final = 512
# Connections that have not named their link. More: strangers hold descriptors that the process
# needs. Fewer: many strangers at once displace a link that comes between them.
_KEY_LIMIT_S: Final = 10.0
# Time for a connection to name its link, which it does at once. Longer: strangers hold descriptors.
# Shorter: links fail on a busy machine.
_END_S: Final = 5.0
# Time for the listening thread to end, which only has to notice it.


class LinkListener:
    """Listens for receivers of other nodes while a sync is open. Owns the listening socket, its
    thread, and one thread for each link whose other end has come.

    A connection begins with the key of its link, which only the ends of the link get, over umbra's
    calls. Any other key closes it. Connections without a key hold no thread, and the oldest makes
    room where there are too many.
    """

    def __init__(self, host: str) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.endpoint = f"{host}:{self._socket.getsockname()[1]}"
        self._links: dict[bytes, SendingLink] = {}
        self._unnamed: dict[socket.socket, _Unnamed] = {}  # the oldest first
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def serve(self, links: Mapping[str, SendingLink], deadline: float) -> None:
        """Runs each link, by key, once its other end has come."""
        self._links = {key.encode(): link for key, link in links.items()}
        self._socket.setblocking(False)
        self._thread = threading.Thread(
            target=self._listen, args=(deadline,), name="links", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Leaves connections of links alone. Idempotent."""
        self._is_closed = True
        with suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which `close` does not
        if self._thread is None:
            self._socket.close()
        else:
            self._thread.join(_END_S)

    def _listen(self, deadline: float) -> None:
        with self._socket, selectors.DefaultSelector() as selector, ExitStack() as stack:
            stack.callback(self._close_unnamed)
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(self._wait_s())]
                for stream in [stream for stream in self._unnamed if stream in ready]:
                    self._hear(stream, selector, deadline)
                now = time.monotonic()
                for stream, unnamed in list(self._unnamed.items()):
                    if unnamed.until <= now:
                        self._drop(stream, selector)
                if self._socket in ready and not self._accept(selector, deadline):
                    return

    def _accept(self, selector: selectors.BaseSelector, deadline: float) -> bool:
        try:
            stream, _ = self._socket.accept()
        except BlockingIOError:  # the other end was gone before
            return True
        except OSError as error:
            if self._unnamed and not self._is_closed:  # too many open files, perhaps
                self._drop(next(iter(self._unnamed)), selector)
                return True
            for link in list(self._links.values()):  # after `close`, all links are closed, too
                link.close(f"no connection could be accepted: {error}")
            return False
        if len(self._unnamed) >= _MAX_UNNAMED:
            self._drop(next(iter(self._unnamed)), selector)
        stream.setblocking(False)
        self._unnamed[stream] = _Unnamed(min(deadline, time.monotonic() + _KEY_LIMIT_S))
        selector.register(stream, selectors.EVENT_READ)
        return True

    def _hear(
        self, stream: socket.socket, selector: selectors.BaseSelector, deadline: float
    ) -> None:
        """Reads a part of a connection's key, and starts its link once the key is whole."""
        try:
            key = self._unnamed[stream].read(stream)
            if key is None:
                return
            link = self._links.pop(key)  # good for one connection
        except (OSError, KeyError):
            self._drop(stream, selector)
            return
        selector.unregister(stream)
        del self._unnamed[stream]
        connection = LinkConnection(stream, deadline)
        thread = threading.Thread(
            target=link.run, args=(connection,), name="weight-link", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the process has too many
            connection.close()
            link.close(f"no thread could be started for it: {error}")

    def _drop(self, stream: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(stream)
        del self._unnamed[stream]
        stream.close()

    def _close_unnamed(self) -> None:
        for stream in self._unnamed:
            stream.close()

    def _wait_s(self) -> float | None:
        if not self._unnamed:
            return None
        return max(0.0, min(each.until for each in self._unnamed.values()) - time.monotonic())


class _Unnamed:
    """A connection that has not sent its whole key; closed at `until`."""

    def __init__(self, until: float) -> None:
        self.until = until
        self._frame = bytearray()  # as of `LinkConnection.receive_frame`

    def read(self, stream: socket.socket) -> bytes | None:
        """The key, and nothing behind it; None while it is not complete. Raises OSError."""
        while True:
            missing = 1 + (self._frame[0] if self._frame else 0) - len(self._frame)
            if self._frame and not missing:
                return bytes(self._frame[1:])
            try:
                data = stream.recv(missing)
            except BlockingIOError:
                return None
            if not data:
                raise ConnectionResetError("the other end closed the connection")
            self._frame += data
