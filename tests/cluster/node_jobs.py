"""A job of several nodes: torchrun on every host, with one rank each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from network import Hosts
from watching import DEADLINE_S, tree

PORT = 29400
"""Of torchrun's store on node 0."""


class NodeJob:
    """Runs one command under torchrun on every host; killed on exit.

    Args:
        program: of each rank, with its arguments.
        rdzv_id: the job's name.
        environments: variables of a host's processes, where they differ.
    """

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        num_nodes: int,
        program: Sequence[str],
        *,
        rdzv_id: str = "job",
        options: Sequence[str] = (),
        environments: Mapping[int, Mapping[str, str]] = {},
    ) -> None:
        self.outputs: list[Path] = []
        self.agents: list[subprocess.Popen[bytes]] = []
        self._hosts = hosts
        self._folder = folder
        self._environments = environments
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_nodes)),
            *("--nproc-per-node", "1", "--master-addr", hosts.address(0)),
            *("--master-port", str(PORT), "--rdzv-id", rdzv_id, "--max-restarts", "0"),
            *("--monitor-interval", "0.1", *options),
        ]
        self._program = program
        for _ in range(num_nodes):
            self.start_next()

    def start_next(self) -> None:
        """Starts the node on the next host."""
        idx = len(self.agents)
        output = self._folder / f"node{idx}.log"
        own = ("--node-rank", str(idx), "--local-addr", self._hosts.address(idx))
        command = [*self._command, *own, *self._program]
        self.outputs.append(output)
        self.agents.append(self._hosts.start(idx, command, output, self._environments.get(idx, {})))

    def wait(self, within_s: float = 3 * DEADLINE_S) -> list[int]:
        """The exit statuses of all nodes."""
        deadline = time.monotonic() + within_s
        return [agent.wait(deadline - time.monotonic()) for agent in self.agents]

    def tree(self, node: int) -> list[int]:
        """All processes of a node."""
        return tree(self.agents[node].pid)

    def text(self, node: int) -> str:
        return self.outputs[node].read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
            agent.wait(DEADLINE_S)


def assert_nothing_left(home: Path) -> None:
    """No socket directory and no key, see the fixture `home`."""
    assert list((home / "umbra_socket_root").iterdir()) == []
    assert list((home / "home").rglob("jobs/*")) == []
