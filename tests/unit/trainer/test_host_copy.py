"""Copies of a GPU's memory, beside a CUDA that locks no memory."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from umbra.trainer.checkpoint.host_copy import HostCopy
from umbra.trainer.world.mesh import Mesh

_dist: Final[Any] = torch.distributed


class NoLocks:
    """Stands for CUDA's runtime, whose error torch raises at its next kernel, once."""

    num_errors = 0

    def cudaHostRegister(self, *_: int) -> int:
        NoLocks.num_errors += 1
        return 2

    def cudaGetErrorString(self, _: int) -> str:
        return "out of memory"


zeros: Any = torch.zeros


def next_kernel(*size: Any, **options: Any) -> Any:
    if options.get("device") != "cuda":
        return zeros(*size, **options)
    NoLocks.num_errors -= 1
    raise RuntimeError("CUDA error: out of memory")


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Generator[Mesh]:
    monkeypatch.setattr(torch.cuda, "cudart", NoLocks)
    monkeypatch.setattr(torch, "zeros", next_kernel)
    monkeypatch.setattr(torch.cuda, "synchronize", torch.device)  # nothing to wait for
    _dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield replace(Mesh.of_group(torch.device("cpu")), device=torch.device("cuda"))
    finally:
        _dist.destroy_process_group()


def test_copies_are_in_ordinary_memory_where_none_can_be_page_locked(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {name: torch.randn(2, 3) for name in ("first", "second")}

    with caplog.at_level(logging.WARNING, logger="umbra"):
        copies = HostCopy(mesh).take(tensors)

    torch.testing.assert_close(dict(copies), tensors, rtol=0, atol=0)
    assert all(copies[name] is not tensors[name] for name in tensors)
    (record,) = caplog.records
    assert record.getMessage() == (
        "copies of a GPU's memory are not page-locked, so that copies to and from GPUs take "
        "longer: out of memory"
    )
    assert NoLocks.num_errors == 0
