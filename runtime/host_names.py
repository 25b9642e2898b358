from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Set


def own_names(host: str) -> frozenset[str]:
    """The names of a server that listens on `host`; its addresses are its own in any case."""
    name = socket.gethostname()
    return frozenset({"localhost", host, name, name.partition(".")[0]})


def is_own_name(host: str | None, names: Set[str]) -> bool:
    """Whether the Host header names this server: by an address or by one of its own names. A page
    of another origin whose name was pointed at this server's address (DNS rebinding) sends the name
    of its origin. Browsers always send the header."""
    if host is None:
        return True
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return True
    return name.lower() in {own.lower() for own in names}
