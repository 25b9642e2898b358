"""Where umbra's HTTP servers listen, and the names that they answer to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Set
from typing import Any

from aiohttp import web

from umbra.runtime.errors import ConfigError


async def listen(runner: web.AppRunner, host: str, port: int, remedy: str) -> tuple[str, int]:
    """The address that the server listens on from now on; port 0 takes a free one. The caller
    cleans the runner up. Raises ConfigError, with the remedy, if it cannot be bound."""
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}): {remedy}"
        ) from error
    bound: Any = runner.addresses[0]
    return bound[0], bound[1]


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
