"""The GPU memory that a rank releases before engines wake."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from umbra.trainer.model.host_offload import HostOffload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GIB = 1 << 30


def test_memory_that_torch_only_caches_is_free_for_other_processes() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    parameter = nn.Parameter(torch.ones(GIB // 4, device=device))
    offload = HostOffload("none", [], device)
    torch.empty(2 * GIB, dtype=torch.uint8, device=device)  # an activation: freed, and cached
    free_nbytes, _ = torch.cuda.mem_get_info(device)

    offload.release_cache()

    now_free_nbytes, _ = torch.cuda.mem_get_info(device)
    assert now_free_nbytes - free_nbytes >= 2 * GIB
    assert float(parameter.detach()[-1]) == 1.0
    assert offload.take_seconds() > 0.0
