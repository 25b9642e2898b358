"""The models and the optimizer steps that a run and a replay of it have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from umbra.runtime.text.model_tokenizer import ModelTokenizer, tokenizer_path
from umbra.trainer.algorithms.advantages import batch_advantages, normalize_over_batch
from umbra.trainer.algorithms.base import AdvantageEstimator, PolicyLoss, load_loss
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.model_export import export_policy
from umbra.trainer.checkpoint.run_dir import RunDir, begin_run
from umbra.trainer.config.algorithm_names import LOSSES, TOKEN_ADVANTAGES
from umbra.trainer.config.trainer_config import RunSection, TrainerConfig
from umbra.trainer.data.train_batch import TrainBatch, random_batch
from umbra.trainer.logprob_check import LogprobCheck
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.model_loading import load_model
from umbra.trainer.model.train_model import CRITIC, POLICY, REFERENCE, TrainModel
from umbra.trainer.objective import PolicyObjective
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.services.memory_needs import LargestMicroBatch
from umbra.trainer.services.services import max_context_len
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh, from_lead


def load_models(
    config: TrainerConfig, mesh: Mesh, display: ProgressDisplay
) -> dict[str, TrainModel]:
    """The policy, the frozen starting model if a KL term needs it, unless that is the policy
    without its adapters, and the critic if there is one. Collective."""
    with display.activity("loading the model"):
        policy = load_model(config.of_policy, mesh.fsdp, trains=True)
    models = {POLICY: policy}
    loaded = f"model of {policy.num_parameters / 1e6:,.1f} M parameters loaded"
    if policy.adapters is not None:
        num_trained = sum(parameter.numel() for parameter in policy.stored.values())
        loaded += f", of which {num_trained / 1e6:,.2f} M in adapters are trained"
    display.note(loaded)
    if config.train.kl_coef and policy.adapters is None:
        with display.activity("loading the reference model"):
            models[REFERENCE] = load_model(config, mesh.fsdp, trains=False)
    if config.has_critic:
        with display.activity("loading the critic"):
            models[CRITIC] = load_model(config.of_critic, mesh.fsdp, trains=True, is_critic=True)
    return models


def make_train_step(
    config: TrainerConfig,
    mesh: Mesh,
    models: dict[str, TrainModel],
    loss: PolicyLoss,
    warn: Callable[[str], None],
    check: LogprobCheck | None,
) -> TrainStep:
    train = config.train
    builder = MicroBatchBuilder(
        packed=models[POLICY].is_packed,
        dtype=getattr(torch, config.model.compute_dtype),
        device=mesh.device,
        aggregation=train.loss_aggregation,
        max_new_tokens=config.rollout.max_new_tokens,
        skips_neutral=train.kl_coef == train.entropy_coef == train.teacher_kl_coef == 0.0
        and train.loss in LOSSES
        and train.advantage not in TOKEN_ADVANTAGES,
    )
    critic = config.critic if config.has_critic else None
    return TrainStep(models, builder, train, PolicyObjective(train, loss), warn, check, critic)


def warm_up(config: TrainerConfig, mesh: Mesh, models: dict[str, TrainModel], step: int) -> None:
    """Runs the passes of a step's largest micro-batch: torch compiles kernels for these sizes. The
    loss, which is not compiled, is umbra's, because a user's may count its calls. Collective."""
    rollout, num_parts = config.rollout, config.train.mini_batches * mesh.world_size
    longest = min(rollout.max_new_tokens, max_context_len(config) - 1)
    prompt_len = min(max_context_len(config) - longest, longest)
    num_samples = -(-config.samples_per_step // num_parts)
    lens = np.random.default_rng(mesh.rank).integers(-(-longest // 3), longest + 1, num_samples)
    costs = lens + prompt_len * (np.arange(num_samples) % rollout.group_size == 0)
    num_tokens = LargestMicroBatch.of(config, mesh.world_size).num_tokens
    lens = lens[: max(1, np.count_nonzero(np.cumsum(costs) <= num_tokens))]
    vocab_size: int = cast("Any", models[POLICY].model).config.get_text_config().vocab_size
    batch = random_batch(lens, prompt_len, rollout.group_size, vocab_size, mesh.rank)
    make_train_step(config, mesh, models, load_loss("clipped"), print, None).warm_up(batch, step)


def add_advantages(config: TrainerConfig, estimate: AdvantageEstimator, batch: TrainBatch) -> None:
    """Adds them as a column, from the rewards of whole groups, until `TrainStep` makes those of
    tokens where `TOKEN_ADVANTAGES` has the setting. Collective."""
    groups, train = batch.groups, config.train
    weights = tuple(config.compared_parts.values()) or (1.0,)
    of_groups = batch_advantages(estimate, groups.rewards, groups.offsets, weights)
    of_samples = batch.of_samples(of_groups)
    if train.advantage_norm == "batch" and train.advantage not in TOKEN_ADVANTAGES:
        of_samples = normalize_over_batch(torch.as_tensor(of_samples)).numpy()
    batch.add_advantages(of_samples)


def decode_token(run_dir: Path, token_id: int) -> str:
    return ModelTokenizer.open(tokenizer_path(run_dir)).decode_all([token_id])


def export_trained(
    config: TrainerConfig,
    models: Mapping[str, TrainModel],
    mesh: Mesh,
    display: ProgressDisplay,
) -> None:
    """Writes the trained model to `run.dir`/export. Collective."""
    with display.activity("exporting the model"):
        export_policy(
            models[POLICY],
            RunDir(config.run.dir).export,
            mesh,
            source=config.model,
            dtype=getattr(torch, config.model.compute_dtype),
        )


def find_resume_point(
    run: RunSection,
    incarnation: int,
    checkpoints: CheckpointStore,
    mesh: Mesh,
    display: ProgressDisplay,
) -> Path | None:
    """Prepares the run directory; returns the newest checkpoint whose files are intact. None if the
    run starts from scratch. Collective."""
    damaged = list[Path]()
    while True:
        path = from_lead(mesh, lambda: begin_run(run, incarnation, damaged))
        if path is None:
            return None
        with display.activity(f"checking {path.name}"):
            damage = checkpoints.find_damage(path)
        if not damage:
            if damaged:
                display.note(f"resuming from the older checkpoint {path} instead")
            return path
        display.note(f"warning: the checkpoint {path} is damaged: {damage}")
        damaged.append(path)
