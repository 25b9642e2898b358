"""Host memory that CUDA has locked."""

from __future__ import annotations

import gc
import logging
import mmap
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from umbra.trainer.model.host_offload import host_buffers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GIB = 1 << 30
NBYTES = GIB + (GIB >> 3)  # torch's own would take 2 GiB
SLACK_NBYTES = GIB >> 4


def resident_nbytes() -> int:
    """Memory of this process, including locked memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_it_is_locked_takes_what_was_asked_for_and_goes_with_its_last_view() -> None:
    on_gpu = torch.arange(NBYTES, device="cuda").to(torch.uint8)
    torch.cuda.synchronize()
    before = resident_nbytes()

    (memory,) = host_buffers([NBYTES], on_gpu=True)
    assert memory.is_pinned()
    memory.copy_(on_gpu, non_blocking=True)
    torch.cuda.synchronize()
    back = torch.empty_like(on_gpu).copy_(memory, non_blocking=True)
    assert torch.equal(back, on_gpu)
    assert abs(resident_nbytes() - before - NBYTES) < SLACK_NBYTES

    view = memory[8:]
    del memory
    gc.collect()
    assert view.is_pinned()
    del view
    gc.collect()
    assert resident_nbytes() - before < SLACK_NBYTES


def test_memory_that_cannot_be_locked_takes_copies_and_later_kernels_do_not_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pages can be locked once."""
    memory = mmap.mmap(-1, GIB)
    monkeypatch.setattr(mmap, "mmap", Mock(return_value=memory))
    on_gpu = torch.arange(GIB >> 2, device="cuda", dtype=torch.int32)

    with caplog.at_level(logging.WARNING, logger="umbra"):
        first, second, third = host_buffers([GIB, GIB, GIB], on_gpu=True)
        doubled = on_gpu * 2

    assert first.is_pinned()
    assert not third.is_pinned()
    assert len(caplog.records) == 1
    third.view(torch.int32).copy_(on_gpu, non_blocking=True)
    assert torch.equal(torch.empty_like(on_gpu).copy_(third.view(torch.int32)), on_gpu)
    assert int(doubled[-1]) == 2 * ((GIB >> 2) - 1)
    del second
