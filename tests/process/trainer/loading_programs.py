"""Programs of the ranks in loading tests; imported by name in each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rank_programs import MAX_NEW_TOKENS, make_world, rank_batch
from torch.distributed.tensor import DTensor
from whole_model import load_whole_model

from umbra.runtime.weights.shards import find_aliases
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import ModelSection, TrainerConfig
from umbra.trainer.model.micro_batches import MicroBatch, MicroBatchBuilder
from umbra.trainer.model.model_loading import load_model, prepare_causal_lm
from umbra.trainer.model.packing import Sample, pack, packing_order
from umbra.trainer.model.train_model import PassSettings, PreparedModel, TrainModel
from umbra.trainer.world.mesh import Mesh


def compare_loading(cases: list[list[str]], device_type: str = "cpu") -> list[dict[str, Any]]:
    """For each [model directory, dtype, wrap]: how both ways of loading differ on this rank."""
    world = make_world(device_type)
    return [_compare(world, *case) for case in cases]


def _compare(world: Mesh, folder: str, dtype_name: str, wrap: Any) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, dtype_name)
    section = ModelSection(path=Path(folder))
    prepared = prepare_causal_lm(section, dtype)
    model, is_packed = load_whole_model(section, dtype)
    assert prepared.is_packed == is_packed
    held = [p.is_meta for p in prepared.model.parameters()]
    passes = PassSettings(compute_dtype=dtype, wrap=wrap)
    ours = TrainModel(prepared, world.fsdp, passes)
    theirs = TrainModel(PreparedModel(model, is_packed), world.fsdp, passes)
    assert list(ours.published) == list(theirs.published)
    assert find_aliases(ours.published) == find_aliases(theirs.published)
    return {
        "sharded": all(held),
        "tensors": len(ours.published),
        "unequal": [
            name
            for name, value in theirs.published.items()
            if not _equal(ours.published[name], value)
        ],
        "unequal_buffers": [
            name
            for name, value in theirs.model.named_buffers()
            if not _equal(ours.model.get_buffer(name), value)
        ],
        "same_logprobs": torch.equal(
            _logprobs(ours, world, dtype), _logprobs(theirs, world, dtype)
        ),
    }


def score_beside(
    folder: str, cases: list[tuple[int, list[int]]], wrap: str = "auto"
) -> list[list[float]]:
    """For each [max_context_len, lengths]: log-probabilities of a short sample in a micro-batch
    with others of these lengths."""
    world = make_world("cpu")
    return [_score_beside(world, folder, wrap, *case) for case in cases]


def _score_beside(
    world: Mesh, folder: str, wrap: str, max_context_len: int, lens: list[int]
) -> list[float]:
    config = check_config(
        TrainerConfig,
        {
            "model": {"path": folder, "dtype": "float32", "fsdp_wrap": wrap},
            "data": {"train": "none.jsonl"},
            "reward": {"function": "none:none"},
            "pool": {"max_context_len": max_context_len},
            "train": {"steps": 1},
        },
        "config",
    )
    policy = load_model(config, world.fsdp, trains=False)
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            tokens=draw.integers(3, 60, n).astype(np.int32), prompt_len=4, generated=np.arange(4, n)
        )
        for n in (10, *lens)
    ]
    order = packing_order(samples)
    ordered = [samples[idx] for idx in order]
    targets = np.concatenate([sample.tokens[sample.generated] for sample in ordered])
    nothing = torch.empty(0)
    micro_batch = MicroBatch(
        inputs=pack(ordered, torch.float32, world.device),
        targets=torch.as_tensor(targets, dtype=torch.int64),
        columns={},
        weights=nothing,
        sample_lens=nothing,
        places=np.zeros(0, np.int64),
    )
    with torch.no_grad():
        logprobs = policy.score(micro_batch).logprobs
    start = sum(len(sample.generated) for sample in ordered[: order.index(0)])
    every = cast("list[float]", cast("Any", logprobs).tolist())
    return every[start:][: len(samples[0].generated)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, DTensor):
        one, other = one.to_local(), other.to_local()
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


@torch.no_grad()
def _logprobs(policy: TrainModel, world: Mesh, dtype: torch.dtype) -> torch.Tensor:
    builder = MicroBatchBuilder(
        packed=policy.is_packed,
        dtype=dtype,
        device=world.device,
        aggregation="token",
        max_new_tokens=MAX_NEW_TOKENS,
    )
    return policy.score(builder.build(rank_batch(world, 3, 1))[0][0]).logprobs
