"""Training on CUDA: the same as on the CPU, with NCCL between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_programs import run_all

from umbra.runtime.testing.world import DistributedWorld

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKEND = "cpu:gloo,cuda:nccl"


def on_gpus(world: DistributedWorld, calls: dict[str, list[Any]], num_ranks: int) -> Any:
    return world(run_all, calls, "cuda", num_ranks=num_ranks, backend=BACKEND, timeout_s=200.0)[0]


def test_gpus_train_like_the_cpu(distributed_world: DistributedWorld) -> None:
    variants = {
        "packed": ["train_variant", {"kl_coef": 0.1}, {}],
        "padded": ["train_variant", {"kl_coef": 0.1}, {"packed": False, "micro_batches": 2}],
        "layer": ["train_variant", {"kl_coef": 0.1}, {"wrap": "layer"}],
        "offloaded": ["train_variant", {"kl_coef": 0.1}, {"offload": "all"}],
        "recomputed": ["train_variant", {"kl_coef": 0.1}, {"recomputes": True, "chunked": True}],
    }
    num_gpus = min(2, torch.cuda.device_count())

    on_gpu = on_gpus(distributed_world, variants, num_gpus)

    on_cpu = distributed_world(run_all, {"cpu": variants["packed"]}, num_ranks=1)[0]["cpu"]
    for name, (parameters, metrics) in on_gpu.items():
        for key, array in on_cpu[0].items():
            np.testing.assert_allclose(parameters[key], array, atol=1e-3, err_msg=f"{name} {key}")
        assert metrics[2]["train/loss"] == pytest.approx(on_cpu[1][2]["train/loss"], abs=1e-3)


def test_the_varlen_kernel_gives_the_models_own_logprobs(
    distributed_world: DistributedWorld,
) -> None:
    calls = {
        "packed": ["half_precision_logprobs", True],
        "padded": ["half_precision_logprobs", False],
    }

    logprobs = on_gpus(distributed_world, calls, 1)

    assert logprobs["packed"].shape == logprobs["padded"].shape
    # Both orders are those of packing; bfloat16 keeps three digits.
    np.testing.assert_allclose(logprobs["packed"], logprobs["padded"], atol=0.1)
