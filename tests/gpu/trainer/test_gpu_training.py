"""Training on CUDA: the same as on the CPU, with NCCL between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_programs import run_all

from umbra.runtime.testing.distributed_world import DistributedWorld

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKEND = "cpu:gloo,cuda:nccl"
NUM_GPUS = min(2, torch.cuda.device_count())  # here: the driver keeps descriptors of the question


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "uncompiled": {
        "packed": {},
        "padded": {"packed": False, "micro_batches": 2},
        "layer": {"wrap": "layer"},
        "offloaded": {"offload": "all"},
        "recomputed": {"recomputes": True, "chunked": True},
    },
    "compiled": {
        "packed": {"compiles": True},
        "recomputed": {"compiles": True, "recomputes": True, "wrap": "layer", "chunked": True},
    },
    "lora": {  # which is merged, and taken back, after the last step
        "packed": {"lora_rank": 3},
        "offloaded": {"lora_rank": 3, "wrap": "layer", "offload": "all"},
    },
}
COMPILE_LIMIT_S = 400.0  # several minutes where nothing is cached


def on_gpus(world: DistributedWorld, calls: dict[str, list[Any]], num_ranks: int) -> Any:
    return world(
        run_all, calls, "cuda", num_ranks=num_ranks, backend=BACKEND, timeout_s=COMPILE_LIMIT_S
    )[0]


def variant(options: dict[str, Any]) -> list[Any]:
    return ["train_variant", {"kl_coef": 0.1}, options]


@pytest.mark.parametrize("kind", list(VARIANTS))
def test_gpus_train_like_the_cpu(umbra_distributed_world: DistributedWorld, kind: str) -> None:
    variants = {name: variant(options) for name, options in VARIANTS[kind].items()}

    on_gpu = on_gpus(umbra_distributed_world, variants, NUM_GPUS)

    options = {"lora_rank": 3} if kind == "lora" else {}
    on_cpu = umbra_distributed_world(run_all, {"cpu": variant(options)}, num_ranks=1)[0]["cpu"]
    for name, (parameters, metrics) in on_gpu.items():
        for key, array in on_cpu[0].items():
            np.testing.assert_allclose(parameters[key], array, atol=1e-3, err_msg=f"{name} {key}")
        assert metrics[2]["train/loss"] == pytest.approx(on_cpu[1][2]["train/loss"], abs=1e-3)


def test_the_varlen_kernel_gives_the_models_own_logprobs_and_gradients(
    umbra_distributed_world: DistributedWorld,
) -> None:
    calls = {
        "packed": ["half_precision_scores", True],
        "padded": ["half_precision_scores", False],
    }

    scores = on_gpus(umbra_distributed_world, calls, 1)

    # Both orders are those of packing; bfloat16 keeps three digits.
    (packed, packed_gradient), (padded, padded_gradient) = scores["packed"], scores["padded"]
    assert packed.shape == padded.shape
    np.testing.assert_allclose(packed, padded, atol=0.1)
    difference = np.linalg.norm(packed_gradient - padded_gradient)
    assert difference < 0.05 * np.linalg.norm(padded_gradient)
