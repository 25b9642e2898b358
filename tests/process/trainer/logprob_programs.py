"""A training step on an engine's tokens, with a trainer whose model differs in one way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from off_policy_programs import as_batch, generate
from rank_programs import TRAIN, full_parameters, make_world
from whole_model import load_whole_model

from umbra.runtime.engine_api.kept_tokens import WHOLE, Truncation
from umbra.runtime.errors import UmbraError
from umbra.runtime.settings import Dtype
from umbra.trainer.algorithms.base import load_loss
from umbra.trainer.checkpoint.run_dir import VersionCounter
from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.data.train_batch import ROLLOUT_LOGPROBS, TrainBatch
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.train_model import POLICY, PassSettings, PreparedModel, TrainModel
from umbra.trainer.objective import PolicyObjective
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh


def run_all(calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Calls of `check_step` by their keys."""
    world = make_world()
    return {key: check_step(world, **arguments) for key, arguments in calls.items()}


def check_step(
    world: Mesh,
    engine: str,
    trainer: str = "",
    dtype: Dtype = "float32",
    temperature: float = 1.0,
    engine_temperature: float | None = None,
    truncation: tuple[float, int] = WHOLE,
    engine_truncation: tuple[float, int] | None = None,
    train: dict[str, Any] | None = None,
    *,
    wrong_token: int | None = None,
    versions: tuple[int, ...] = (0,),
    differed_by: float | None = None,
) -> dict[str, Any]:
    """One step for each of `versions`, the current one, on an engine's tokens of version 0.

    Only the last rank has samples.

    Args:
        engine, trainer: folders of their models; the trainer's is the engine's by default.
        differed_by: mean difference in the last step that was compared before a resume.
        wrong_token: index of the one token whose logprob the engine reports 1 too low.

    Returns:
        "error", "warnings", "metrics" of each step, and whether a step "changed" a parameter.
    """
    settings = replace(TRAIN, updates_per_batch=2, **(train or {}))
    samples = generate(
        [engine],
        engine_temperature or temperature,
        getattr(torch, dtype),
        Truncation(*(engine_truncation or truncation)),
    )
    batch = as_batch(samples)
    if wrong_token is not None:
        batch.columns[ROLLOUT_LOGPROBS][wrong_token] -= 1.0
    section = ModelSection(path=Path(trainer or engine))
    model, is_packed = load_whole_model(section, torch.float32)
    passes = PassSettings(
        compute_dtype=getattr(torch, dtype),
        temperature=temperature,
        truncation=Truncation(*truncation),
    )
    policy = TrainModel(PreparedModel(model, is_packed), world.fsdp, passes, settings)
    builder = MicroBatchBuilder(
        packed=is_packed,
        dtype=getattr(torch, dtype),
        device=world.device,
        aggregation="token",
        max_new_tokens=40,
    )
    counter = VersionCounter(Path("/nowhere"), versions[0], writes=False)
    warnings: list[str] = []
    earlier = {f"train/logprob_difference_{name}": differed_by or 0.0 for name in ("mean", "max")}
    check = LogprobCheck(
        dtype,
        settings.max_logprob_difference,
        counter,
        lambda token: f"<{token}>",
        warnings.append,
        [] if differed_by is None else [earlier, {}],
    )
    objective = PolicyObjective(settings, load_loss(settings.loss))
    step = TrainStep({POLICY: policy}, builder, settings, objective, warnings.append, check)
    before = full_parameters(policy)
    metrics: list[dict[str, float]] = []
    error = ""
    try:
        for idx, version in enumerate(versions):
            counter.current = version
            metrics.append(step.run(_share(batch, world), idx))
    except UmbraError as raised:
        error = str(raised)
    after = full_parameters(policy)
    changed = any(not np.array_equal(before[name], after[name]) for name in before)
    return {"error": error, "warnings": warnings, "metrics": metrics, "changed": changed}


def _share(batch: TrainBatch, world: Mesh) -> TrainBatch:
    """All micro-batches for the last rank, and padding for the others."""
    if world.rank == world.world_size - 1:
        return batch
    (mini_batch,) = batch.mini_batches
    padding: list[list[int]] = [[] for _ in mini_batch.micro_batches]
    return replace(batch, mini_batches=[replace(mini_batch, micro_batches=padding)])
