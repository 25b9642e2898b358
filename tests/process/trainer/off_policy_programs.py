"""Programs of the ranks in tests of off-policy training; imported by name in each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rank_programs import (
    NO_GROUPS,
    TRAIN,
    Arrays,
    full_parameters,
    make_builder,
    make_policy,
    make_train_step,
    make_world,
    rank_batch,
    whole,
)
from whole_model import load_whole_model

from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_worker import load_checkpoint
from umbra.engines.embedded.scheduler import Limits
from umbra.runtime.engine_api.decoder_config import load_model_config
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.kept_tokens import WHOLE, Truncation
from umbra.trainer.algorithms.base import LossInputs
from umbra.trainer.algorithms.losses import decoupled_loss
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.config.trainer_config import ModelSection, TrainSection
from umbra.trainer.data.train_batch import ADVANTAGES, ROLLOUT_LOGPROBS, MiniBatch, TrainBatch
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.train_model import (
    CRITIC,
    POLICY,
    REFERENCE,
    PassSettings,
    PreparedModel,
    TrainModel,
)
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh

PROMPTS = [[5, 9, 33], [7], [12, 60, 3, 3, 41, 8, 20], [30, 31]]
SAMPLES_PER_PROMPT, MAX_NEW_TOKENS, MAX_CONTEXT_LEN = 4, 40, 128


def run_all(calls: dict[str, list[Any]]) -> dict[str, Any]:
    """Calls of programs in this module, `[name, *args]` each, one after the other."""
    world = make_world()
    return {key: globals()[name](world, *args) for key, (name, *args) in calls.items()}


def changed(changes: dict[str, Any]) -> TrainSection:
    return replace(TRAIN, **changes)


def split_batch(
    world: Mesh, seed: int, num_micro_batches: int, num_mini_batches: int
) -> TrainBatch:
    """A random batch of one rank, whose micro-batches are dealt to mini-batches."""
    batch = rank_batch(world, seed, num_micro_batches)
    (whole_batch,) = batch.mini_batches
    mini_batches: list[MiniBatch] = []
    for first in range(num_mini_batches):
        micro_batches = whole_batch.micro_batches[first::num_mini_batches]
        samples = list(chain(*micro_batches))
        num_tokens = sum(int(batch.mask[batch.span(idx)].sum()) for idx in samples)
        mini_batches.append(MiniBatch(micro_batches, num_tokens, len(samples)))
    return replace(batch, mini_batches=mini_batches)


def train_steps(
    world: Mesh, changes: dict[str, Any], num_micro_batches: int, num_mini_batches: int = 1
) -> list[Any]:
    """Three steps on tokens of another policy: parameters, metrics, and the model's passes."""
    train = changed(changes)
    policy = make_policy(world, train)
    builder = make_builder(world, policy, train)
    # A policy's first pass has others besides it, which compare its head with the model's own.
    policy.measure(builder.build(rank_batch(world, 0, 1))[0][0])
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    model: Any = policy.model
    model.get_decoder().register_forward_hook(count)
    reference = make_policy(world, None) if train.kl_coef else None
    train_step = make_train_step(world, policy, train, reference)
    metrics = [
        train_step.run(split_batch(world, seed, num_micro_batches, num_mini_batches), seed)
        for seed in range(3)
    ]
    return [full_parameters(policy), metrics, passes]


def train_by_hand(
    world: Mesh, changes: dict[str, Any], num_micro_batches: int, num_mini_batches: int = 1
) -> Arrays:
    """`train_steps` as the papers have it: the proximal policy has a pass of its own. The KL, if
    there is one, is in the reward."""
    train = changed(changes)
    policy, reference = make_policy(world, train), make_policy(world, None)
    builder = make_builder(world, policy, train)
    for seed in range(3):
        batch = split_batch(world, seed, num_micro_batches, num_mini_batches)
        mini_batches = [
            [(micro_batch, policy.measure(micro_batch).logprobs) for micro_batch in mini_batch]
            for mini_batch in builder.build(batch)
        ]
        for micro_batch, proximal in chain(*mini_batches):
            kl = proximal - reference.measure(micro_batch).logprobs
            ends = whole(micro_batch.sample_lens.cumsum(0))
            stops = [min(end for end in ends if end > at) for at in range(len(kl))]
            penalties = [kl[at:stop].sum() for at, stop in enumerate(stops)]
            micro_batch.columns[ADVANTAGES] -= train.kl_coef * torch.stack(penalties)
        for mini_batch in train.updates_per_batch * mini_batches:
            for idx, (micro_batch, proximal) in enumerate(mini_batch, 1):
                inputs = LossInputs(
                    rollout_logprobs=micro_batch.columns[ROLLOUT_LOGPROBS],
                    proximal_logprobs=proximal,
                    advantages=micro_batch.columns[ADVANTAGES],
                    weights=micro_batch.weights,
                    sample_lens=micro_batch.sample_lens,
                )
                result = decoupled_loss(policy.score(micro_batch).logprobs, inputs, train)
                policy.backward(result.loss, is_last=idx == len(mini_batch))
            policy.step(seed)
    return full_parameters(policy)


def train_on_policy(world: Mesh, changes: dict[str, Any], num_micro_batches: int) -> list[Any]:
    """Three steps, each on tokens of the policy as it is; [parameters, metrics of each step]."""
    train = changed(changes)
    policy = make_policy(world, train)
    builder = make_builder(world, policy, train)
    train_step = make_train_step(world, policy, train)
    metrics: list[dict[str, float]] = []
    for seed in range(3):
        batch = rank_batch(world, seed, num_micro_batches)
        batch.columns[ROLLOUT_LOGPROBS] = recomputed(policy, builder, batch)
        metrics.append(train_step.run(batch, seed))
    return [full_parameters(policy), metrics]


def recomputed(
    policy: TrainModel, builder: MicroBatchBuilder, batch: TrainBatch
) -> NDArray[np.float32]:
    """The batch's logprobs under the policy, in the batch's order; 0 where not generated."""
    found = np.zeros(len(batch.tokens), np.float32)
    for micro_batch in chain(*builder.build(batch)):
        if len(micro_batch.places):  # not so in padding
            found[micro_batch.places] = whole(policy.measure(micro_batch).logprobs)
    return found


def resume(
    world: Mesh, changes: dict[str, Any], folder: str, num_steps: int, every: int = 0
) -> list[Arrays]:
    """Parameters of all models after one step more than `num_steps`, at a stretch, and from a
    checkpoint with another `reference_every`."""
    train = changed(changes)
    models = make_models(world, train)
    train_step = step_of(world, models, train)
    for seed in range(num_steps):
        train_step.run(rank_batch(world, seed, 2), seed)
    store = CheckpointStore(Path(folder), world, keep=1)
    state = TrainerState(step=num_steps, version=1, world_size=world.world_size, seed=0)
    saved = store.save(state, models)
    train_step.run(rank_batch(world, num_steps, 2), num_steps)

    resumed = make_models(world, replace(train, reference_every=every))
    train_step = step_of(world, resumed, train)
    store.load(saved, resumed)
    train_step.run(rank_batch(world, num_steps, 2), num_steps)
    return [
        {f"{name}/{n}": value for name in each for n, value in full_parameters(each[name]).items()}
        for each in (models, resumed)
    ]


def step_of(world: Mesh, models: dict[str, TrainModel], train: TrainSection) -> TrainStep:
    reference, critic = models.get(REFERENCE), models.get(CRITIC)
    return make_train_step(world, models[POLICY], train, reference, critic=critic)


def make_models(world: Mesh, train: TrainSection) -> dict[str, TrainModel]:
    models = {POLICY: make_policy(world, train)}
    if train.kl_coef:
        models[REFERENCE] = make_policy(world, None)
        models[REFERENCE].is_saved = train.reference_every > 0
    if train.advantage == "gae":
        models[CRITIC] = make_policy(world, train, is_critic=True)
    return models


@dataclass(slots=True)
class _Generated:
    tokens: list[int]
    prompt_len: int
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])


def generate_and_recompute(
    world: Mesh, folders: list[str], temperature: float, attention: Literal["packed", "padded"]
) -> Arrays:
    """An engine's logprobs of what it generated, and the trainer's of the same tokens.

    The engine gets the weights of the next of `folders` in mid-generation, as version 1.

    Returns:
        "versions", "engine", and the trainer's with the weights of each version: "0" and "1".
    """
    samples = generate(folders, temperature)
    batch = as_batch(samples)
    arrays: Arrays = {
        "versions": np.concatenate([sample.versions for sample in samples]),
        "engine": batch.columns[ROLLOUT_LOGPROBS][batch.mask == 1],
    }
    for version, folder in enumerate(folders):
        section = ModelSection(path=Path(folder), attention=attention)
        model, is_packed = load_whole_model(section, torch.float32)
        passes = PassSettings(compute_dtype=torch.float32, temperature=temperature)
        policy = TrainModel(PreparedModel(model, is_packed), world.fsdp, passes)
        builder = make_builder(world, policy, TRAIN)
        arrays[str(version)] = recomputed(policy, builder, batch)[batch.mask == 1]
    return arrays


def generate(
    folders: Sequence[str],
    temperature: float,
    dtype: torch.dtype = torch.float32,
    truncation: Truncation = WHOLE,
) -> list[_Generated]:
    model = DecoderModel(
        load_model_config(folders[0]),
        max_context_len=MAX_CONTEXT_LEN,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    limits = Limits(
        max_num_seqs=16, max_context_len=MAX_CONTEXT_LEN, kv_cache_num_tokens=16 * MAX_CONTEXT_LEN
    )
    core = EngineCore(model, limits)
    prompts = [prompt for prompt in PROMPTS for _ in range(SAMPLES_PER_PROMPT)]
    samples = [_Generated(list(prompt), len(prompt)) for prompt in prompts]
    core.add(
        [
            GenerationRequest(
                id=idx,
                tokens=np.array(prompt, np.int32),
                position=0,
                seed=100 + idx,
                max_new_tokens=MAX_NEW_TOKENS - idx,
                temperature=temperature,
                stop_token_ids=(1,),
                **truncation._asdict(),
            )
            for idx, prompt in enumerate(prompts)
        ]
    )
    for version, folder in enumerate(folders):
        core.preempt_all()  # what was computed with other weights is computed again
        load_checkpoint(folder, model.parameters)
        core.set_version(version)
        num_steps = 0
        while core.has_work and (version == len(folders) - 1 or num_steps < MAX_NEW_TOKENS // 3):
            core.step()
            num_steps += 1
    _collect(core, samples)
    return samples


def _collect(core: EngineCore, samples: Sequence[_Generated]) -> None:
    deltas = core.take_deltas()
    assert deltas is not None
    bounds = deltas["offsets"].tolist()
    for run, idx in enumerate(deltas["ids"]):
        sample, span = samples[int(idx)], slice(bounds[run], bounds[run + 1])
        sample.tokens += deltas["tokens"][span].tolist()
        sample.logprobs += deltas["logprobs"][span].tolist()
        sample.versions += [int(deltas["versions"][run])] * (span.stop - span.start)


def as_batch(samples: Sequence[_Generated]) -> TrainBatch:
    masks = [np.arange(len(sample.tokens)) >= sample.prompt_len for sample in samples]
    mask = np.concatenate(masks).astype(np.uint8)
    logprobs = np.zeros(len(mask), np.float32)
    logprobs[mask == 1] = np.concatenate([sample.logprobs for sample in samples])
    versions = np.full(len(mask), -1, np.int64)
    versions[mask == 1] = np.concatenate([sample.versions for sample in samples])
    return TrainBatch(
        tokens=np.concatenate([sample.tokens for sample in samples]).astype(np.int32),
        offsets=np.cumsum([0, *(len(sample.tokens) for sample in samples)]).astype(np.int32),
        prompt_lens=np.array([sample.prompt_len for sample in samples], np.int32),
        mask=mask,
        columns={ROLLOUT_LOGPROBS: logprobs, ADVANTAGES: np.ones(len(mask), np.float32)},
        groups=NO_GROUPS,
        versions=versions,
        sample_ids=[f"e0/0/{idx}" for idx in range(len(samples))],
        mini_batches=[
            MiniBatch(
                [list(range(0, len(samples), 2)), list(range(1, len(samples), 2))],
                int(mask.sum()),
                len(samples),
            )
        ],
        metrics={},
    )
