"""Endpoints of tcp sockets as text: `tcp://10.0.0.1:7000`, or `tcp://[fd00::1]:7000`."""

from __future__ import annotations

_SCHEME = "tcp://"


def endpoint_at(host: str, port: int | str) -> str:
    """The endpoint of an address without brackets. Port "*" stands for any free one."""
    return f"{_SCHEME}[{host}]:{port}" if ":" in host else f"{_SCHEME}{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """Host, without brackets, and port; ("", "") of none. The scheme may be missing."""
    host, _, port = endpoint.removeprefix(_SCHEME).rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def is_ipv6(endpoint: str) -> bool:
    return endpoint.startswith(f"{_SCHEME}[")
