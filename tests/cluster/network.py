"""Hosts of a test: network namespaces of this machine, joined by a bridge. They share its files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

_INTERFACE = "eth0"
_DELAY = Path(__file__).with_name("frame_delay.py")


class Hosts:
    """Hosts 0, 1, ... with addresses in one network. A context manager; needs root."""

    def __init__(self, num_hosts: int) -> None:
        self._switch = f"umbra-{os.getpid()}-switch"
        self._names = [f"umbra-{os.getpid()}-{idx}" for idx in range(num_hosts)]
        self._stack = contextlib.ExitStack()

    def address(self, host: int) -> str:
        return f"10.87.0.{host + 1}"

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_namespace(self._switch))
            _ip("-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
            for idx, name in enumerate(self._names):
                stack.enter_context(_namespace(name))
                port = f"port{idx}"
                ends = ("type", "veth", "peer", "name", port, "netns", self._switch)
                _ip("link", "add", _INTERFACE, "netns", name, *ends)
                _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
                _ip("-n", name, "addr", "add", f"{self.address(idx)}/24", "dev", _INTERFACE)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", _INTERFACE, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def start(
        self, host: int, command: Sequence[str], output_path: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host. Its output goes to the file."""
        with output_path.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *command],
                env={**os.environ, "GLOO_SOCKET_IFNAME": _INTERFACE, **env},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def cut_off(self, host: int) -> None:
        """Drops all that the host sends to others or gets from them."""
        for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o")):
            self._iptables(host, "-A", chain, direction, _INTERFACE, "-j", "DROP")

    def reset_connections(self, host: int, port: int) -> None:
        """Answers whatever others send to a tcp port of the host as if nobody had it open."""
        packets = ("-i", _INTERFACE, "-p", "tcp", "--dport", str(port))
        self._iptables(host, "-A", "INPUT", *packets, "-j", "REJECT", "--reject-with", "tcp-reset")

    def reconnect(self, host: int) -> None:
        self._iptables(host, "-F")

    @contextlib.contextmanager
    def losing(self, share: float) -> Generator[None]:
        """Within the block, each host loses this share of the packets that others send to it."""
        # Dropped where they arrive: the sender of a packet that its own OUTPUT chain drops is
        # informed of it.
        loss = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        try:
            for host in range(len(self._names)):
                self._iptables(host, "-A", "INPUT", "-i", _INTERFACE, *loss, "-j", "DROP")
            yield
        finally:
            for host in range(len(self._names)):
                self.reconnect(host)

    @contextlib.contextmanager
    def delayed(self, host: int, delay_s: float) -> Generator[None]:
        """Within the block, all frames between this host and the others take that much longer.

        other hosts ── bridge ── near ═ frame_delay.py ═ far ── far-bridge ── the host
        """
        switch, port = self._switch, f"port{host}"
        with contextlib.ExitStack() as stack:
            _ip("-n", switch, "link", "add", "far-bridge", "up", "type", "bridge")
            stack.callback(_ip, "-n", switch, "link", "del", "far-bridge")
            for tap, bridge in (("near", "bridge"), ("far", "far-bridge")):
                _ip("-n", switch, "tuntap", "add", "dev", tap, "mode", "tap")
                stack.callback(_ip, "-n", switch, "link", "del", tap)
                _ip("-n", switch, "link", "set", tap, "master", bridge, "up")
            delay = (sys.executable, str(_DELAY), str(delay_s), "near", "far")
            program = subprocess.Popen(
                ["ip", "netns", "exec", switch, *delay], stdout=subprocess.PIPE
            )
            stack.enter_context(program)
            stack.callback(program.kill)
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            _ip("-n", switch, "link", "set", port, "master", "far-bridge")
            stack.callback(_ip, "-n", switch, "link", "set", port, "master", "bridge")
            yield

    @contextlib.contextmanager
    def name_service(self, host: int, **files: str) -> Generator[None]:
        """Within the block, programs that are started on the host have other files in /etc, such as
        `hosts` and `resolv.conf`, whose dot is a `_` here."""
        folder = Path("/etc/netns", self._names[host])
        folder.mkdir(parents=True)
        try:
            for name, text in files.items():
                (folder / name.replace("_", ".")).write_text(text)
            yield
        finally:
            shutil.rmtree(folder)

    def num_dropped(self, host: int) -> int:
        """Packets to this host that were dropped since it was last reconnected."""
        rows = self._iptables(host, "-L", "INPUT", "-v", "-x", "-n").splitlines()
        return sum(int(row.split()[0]) for row in rows if "DROP" in row.split())

    def _iptables(self, host: int, *arguments: str) -> str:
        return subprocess.run(
            ["ip", "netns", "exec", self._names[host], "iptables", *arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout


@contextlib.contextmanager
def _namespace(name: str) -> Generator[None]:
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
