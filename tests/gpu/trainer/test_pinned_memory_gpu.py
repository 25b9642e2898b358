"""Host memory that CUDA has locked."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from umbra.runtime.errors import ConfigError
from umbra.trainer.model.host_offload import pinned_bytes

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

    memory = pinned_bytes(NBYTES)
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


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be page-locked .* train\.offload"):
        pinned_bytes(1 << 60)
