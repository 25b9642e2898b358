"""Orders from the adapter to its code in SGLang's scheduler processes, and reports back.

SGLang hands tensors to a custom weight loader. An order travels as the name of an empty tensor.
SGLang does not pass on what a loader returns, and ends if the loader raises, so each worker writes
its report to a file of the adapter's.

    adapter                             worker, one for each GPU
      | -- order {action, report, ..} --> |
      | <-- report in shared memory ----- |  before SGLang answers
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgpack


def pack_order(order: Mapping[str, Any]) -> str:
    return base64.b64encode(msgpack.packb(dict(order))).decode()


def unpack_order(name: str) -> dict[str, Any]:
    order: dict[str, Any] = msgpack.unpackb(base64.b64decode(name))
    return order


def write_report(path: str, report: Mapping[str, Any]) -> None:
    with open(path, "wb") as file:
        file.write(msgpack.packb(dict(report)))


class Reports:
    """Files for the workers' reports on one order; memory without a name, freed at the exit."""

    def __init__(self, num_workers: int) -> None:
        self._fds = [os.memfd_create("umbra-report", os.MFD_CLOEXEC) for _ in range(num_workers)]

    @property
    def paths(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def read(self) -> list[dict[str, Any]]:
        """One report per worker; {"error": ...} for a worker that left none."""
        return [self._read(fd) for fd in self._fds]

    @staticmethod
    def _read(fd: int) -> dict[str, Any]:
        data = os.pread(fd, os.fstat(fd).st_size, 0)
        report: dict[str, Any] = msgpack.unpackb(data) if data else {"error": "it wrote no report"}
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd in self._fds:
            os.close(fd)
