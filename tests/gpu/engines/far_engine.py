"""An engine of another node, in a process of its own on a GPU: `python far_engine.py FD`.

It has tensors and generates nothing. The test's end is `FarEngine` in `far_pool`.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from ipc_rank import DEVICE, mixed_tensors
from torch import Tensor

from umbra.runtime.weights.transports.shared_memory.destinations import Destinations
from umbra.runtime.weights.weight_receiver import WeightReceiver


class Engine:
    """Carries out the test's commands."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {
            name: torch.full(tensor.shape, 77, dtype=tensor.dtype, device=DEVICE)
            for name, tensor in mixed_tensors(0).items()
        }
        self._receiver = WeightReceiver(self._tensors)

    def begin(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        self._receiver.begin(manifest, buckets)

    def load(self) -> int:
        return self._receiver.load()

    def verify(self, regions: Sequence[Sequence[int | None]]) -> list[str]:
        return self._receiver.verify(regions)

    def end(self) -> None:
        self._receiver.end()

    def num_wrong(self, sign: int) -> int:
        """Elements that differ from `sign` times the first version."""
        return sum(
            int((self._tensors[name].cpu() != sign * tensor).sum())
            for name, tensor in mixed_tensors(0).items()
        )

    def die_in_mid_transfer(self) -> None:
        """The next load kills this process at its second bucket."""
        write = Destinations.write

        def fatal(self: Destinations, idx: int, memory: Tensor, *, waits: bool = True) -> int:
            if idx == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, idx, memory, waits=waits)

        Destinations.write = fatal


def commands(connection: Connection) -> Iterator[tuple[str, tuple[Any, ...]]]:
    while True:
        try:
            yield connection.recv()
        except EOFError:
            return


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    engine = Engine()
    connection.send(("done", None))
    for method, arguments in commands(connection):
        try:
            connection.send(("done", getattr(engine, method)(*arguments)))
        except Exception:  # noqa: BLE001 - the test's to see
            connection.send(("failed", traceback.format_exc()))


if __name__ == "__main__":
    main()
