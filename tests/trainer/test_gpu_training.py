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
        "compiled": ["train_variant", {"kl_coef": 0.1}, {"compiles": True}],
        "compiled, recomputed, layer": [
            "train_variant",
            {"kl_coef": 0.1},
            {"compiles": True, "recomputes": True, "wrap": "layer", "chunked": True},
        ],
        "recomputed": ["train_variant", {"kl_coef": 0.1}, {"recomputes": True, "chunked": True}],
    }
    num_gpus = min(2, torch.cuda.device_count())

    on_gpu = on_gpus(distributed_world, variants, num_gpus)

    on_cpu = distributed_world(run_all, {"cpu": variants["packed"]}, num_ranks=1)[0]["cpu"]
    for name, (parameters, metrics) in on_gpu.items():
        for key, array in on_cpu[0].items():
            np.testing.assert_allclose(parameters[key], array, atol=1e-3, err_msg=f"{name} {key}")
        assert metrics[2]["train/loss"] == pytest.approx(on_cpu[1][2]["train/loss"], abs=1e-3)


def test_the_varlen_kernel_gives_the_models_own_logprobs_and_gradients(
    distributed_world: DistributedWorld,
) -> None:
    calls = {
        "packed": ["half_precision_scores", True],
        "padded": ["half_precision_scores", False],
    }

    scores = on_gpus(distributed_world, calls, 1)

    # Both orders are those of packing; bfloat16 keeps three digits.
    (packed, packed_gradient), (padded, padded_gradient) = scores["packed"], scores["padded"]
    assert packed.shape == padded.shape
    np.testing.assert_allclose(packed, padded, atol=0.1)
    difference = np.linalg.norm(packed_gradient - padded_gradient)
    assert difference < 0.05 * np.linalg.norm(padded_gradient)
