"""Orders from the adapter to its code in SGLang's scheduler processes, and reports back.

SGLang hands tensors to a custom weight loader. An order travels as the name of an empty tensor.
SGLang does not pass on what a loader returns, and ends if the loader raises, so the first worker
collects the reports of all, which may be on other nodes, and writes them to the adapter's file.

    adapter                             first worker              other workers, one for each GPU
      | -- order {action, report, ..} --> | --------------------------> |
      |                                   | <-- report (gloo) --------- |
      | <-- reports in shared memory ---- |  before SGLang answers
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgpack

from umbra.runtime.errors import EngineError


def pack_order(order: Mapping[str, Any]) -> str:
    return base64.b64encode(msgpack.packb(dict(order))).decode()


def unpack_order(name: str) -> dict[str, Any]:
    order: dict[str, Any] = msgpack.unpackb(base64.b64decode(name))
    return order


def write_reports(address: Sequence[Any], reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises OSError if the file is gone: its descriptor may belong to another one."""
    path, *identity = address
    with open(path, "r+b") as file:
        if _identity(file.fileno()) != identity:
            raise FileNotFoundError(f"{path} is another file now")
        file.write(msgpack.packb(list(reports)))


def _identity(fd: int) -> list[int]:
    status = os.fstat(fd)
    return [status.st_dev, status.st_ino]


class ReportFile:
    """Memory without a name for the workers' reports on one order; freed at the exit."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("umbra-reports", os.MFD_CLOEXEC)

    @property
    def address(self) -> list[Any]:
        return [f"/proc/{os.getpid()}/fd/{self._fd}", *_identity(self._fd)]

    def read(self) -> list[dict[str, Any]]:
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        if not data:
            raise EngineError("SGLang's first worker wrote no reports")
        reports: list[dict[str, Any]] = msgpack.unpackb(data)
        return reports

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._fd)
