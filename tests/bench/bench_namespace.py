"""Runs a benchmark in a network namespace of its own, where it can count its bytes."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench_programs import BenchError

IN_NAMESPACE: Final = "UMBRA_BENCH_IN_NAMESPACE"
# Is set there.
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
_IFREQ: Final = "16sH22x"
# Of Linux's netdevice(7).


def run_in_namespace() -> int:
    """Runs this script again where only its own bytes pass through the loopback; returns its exit
    status."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    ended = subprocess.run(
        ["unshare", *user, "--net", sys.executable, __file__, *sys.argv],
        env={**os.environ, IN_NAMESPACE: "1"},
        check=False,
    )
    return ended.returncode


def bring_up_loopback() -> None:
    """In a new namespace it is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = bytearray(struct.pack(_IFREQ, b"lo", 0))
        fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        name, flags = struct.unpack(_IFREQ, request)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack(_IFREQ, name, flags | _IFF_UP))


def slow_loopback(gbit: int) -> None:
    """Lets the loopback of this namespace carry so many gigabits per second in all."""
    rule = ["rate", f"{gbit}gbit", "burst", "256k", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *rule], check=True)


def loopback_nbytes() -> int:
    """Bytes sent through the loopback, which sends and receives each of them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise BenchError("there is no loopback interface")


if __name__ == "__main__":
    bring_up_loopback()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
