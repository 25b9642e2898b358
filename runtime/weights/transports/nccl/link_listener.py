"""Where the receivers of other nodes connect to a rank."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from umbra.runtime.errors import DeadlineExceeded
from umbra.runtime.weights.transports.nccl.link_connection import LinkConnection
from umbra.runtime.weights.transports.nccl.weight_links import SendingLink

_BACKLOG: Final = 512
# Connections that wait until `serve` is called: one for each other node.
_KEY_LIMIT_S: Final = 10.0
# For a connection to name its link, which it does at once. Longer: strangers hold threads. Shorter:
# links fail on a busy machine.


class LinkListener:
    """Listens at one address of this node while a sync is open. Owns the listening socket, its
    thread, and one thread for each connection, which becomes that of the link.

    A connection begins with the key of its link, which only the ends of the link get, over umbra's
    calls. One with any other key is closed.
    """

    def __init__(self, host: str) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.endpoint = f"{host}:{self._socket.getsockname()[1]}"
        self._links: dict[bytes, SendingLink] = {}

    def serve(self, links: Mapping[str, SendingLink], deadline: float) -> None:
        """Runs each link once its other end has come. Connections wait until this is called.

        Args:
            links: by key.
        """
        self._links = {key.encode(): link for key, link in links.items()}
        args = (self._socket, deadline)
        threading.Thread(target=self._accept, args=args, name="links", daemon=True).start()

    def close(self) -> None:
        """Leaves connections of links alone. Idempotent."""
        with suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # ends `accept`, which `close` alone does not
        self._socket.close()

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError as error:  # after `close`, when all links are closed, too
                for link in list(self._links.values()):
                    link.close(f"no connection could be accepted: {error}")
                return
            connection = LinkConnection(stream, min(deadline, time.monotonic() + _KEY_LIMIT_S))
            args = (connection, deadline)
            threading.Thread(target=self._run, args=args, name="weight-link", daemon=True).start()

    def _run(self, connection: LinkConnection, deadline: float) -> None:
        try:
            link = self._links.pop(connection.receive_frame())  # good for one connection
        except (OSError, DeadlineExceeded, KeyError):
            connection.close()
            return
        connection.deadline = deadline
        link.run(connection)
