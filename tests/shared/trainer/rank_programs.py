"""Programs of the ranks in distributed tests; imported by name in each rank.

Arguments and results are umbra's wire values: plain data and numpy arrays.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor
from training_models import make_model
from whole_model import load_whole_model

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.trajectory import GroupShape
from umbra.runtime.rollout.manager.batch_answers import plan_batch
from umbra.runtime.settings import to_wire
from umbra.runtime.weights.shards import local_part
from umbra.trainer.algorithms.advantages import normalize_over_batch
from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput, load_loss
from umbra.trainer.checkpoint.checkpoint_store import CheckpointStore
from umbra.trainer.checkpoint.model_export import export_policy
from umbra.trainer.checkpoint.trainer_state import TrainerState
from umbra.trainer.config.trainer_config import (
    CriticSection,
    LoraSection,
    ModelSection,
    TrainSection,
)
from umbra.trainer.data.train_batch import (
    ADVANTAGES,
    ROLLOUT_LOGPROBS,
    MiniBatch,
    RewardGroups,
    TrainBatch,
    random_batch,
)
from umbra.trainer.model import token_scoring
from umbra.trainer.model.host_offload import HostOffload, Offload
from umbra.trainer.model.lora_layers import LoraAdapters, matrices_of, merged, origin
from umbra.trainer.model.merged_weights import MergedWeights
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.model_loading import replace_head
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.train_model import (
    CRITIC,
    POLICY,
    REFERENCE,
    PassSettings,
    PreparedModel,
    TrainModel,
    Wrap,
)
from umbra.trainer.objective import PolicyObjective
from umbra.trainer.step import MetricTotals, TrainStep
from umbra.trainer.world.mesh import Mesh, agree_on_signal, barrier, from_lead, share_cores

GROUPS, GROUP_SIZE, MAX_NEW_TOKENS = 6, 4, 12
# Of batches that have their advantages.
NO_GROUPS = RewardGroups(np.zeros((1, 0), np.float32), np.zeros(1, np.int32), np.zeros(0, np.int32))
# A large eps, because Adam divides by the gradient's own size: with the usual one, where a
# gradient is almost zero, its rounding would show in full.
TRAIN = TrainSection(
    steps=20, learning_rate=0.1, eps=0.01, weight_decay=0.1, max_grad_norm=0.1, clip_eps_high=0.3
)
# The policy's first step is the second.
CRITIC_SETTINGS = CriticSection(warmup_steps=1, value_clip=0.05, gamma=0.99, lam=0.9)


def make_policy(
    world: Mesh,
    train: TrainSection | None = TRAIN,
    *,
    packed: bool = True,
    wrap: Wrap = "root",
    kind: str = "qwen3",
    recomputes: bool = False,
    compiles: bool = False,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    is_critic: bool = False,
) -> TrainModel:
    model = make_model(kind)
    if packed:
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)
    passes = PassSettings(
        compute_dtype=torch.float32,
        wrap=wrap,
        temperature=0.9,
        recomputes=recomputes,
        compiles=compiles,
    )
    lora = LoraSection(rank=lora_rank, alpha=8.0, targets=tuple(lora_targets))
    adapters = LoraAdapters(model, lora, torch.float32) if lora_rank else None
    if is_critic:
        replace_head(model, torch.float32)
    prepared = PreparedModel(model, packed, None, adapters, is_critic=is_critic)
    return TrainModel(prepared, world.fsdp, passes, train)


def rank_batch(world: Mesh, seed: int, micro_batches: int) -> TrainBatch:
    """This rank's share of a random global batch, dealt as the rollout manager does."""
    generator = np.random.default_rng(seed)
    lens = generator.integers(1, MAX_NEW_TOKENS + 1, (GROUPS, GROUP_SIZE))
    prompt_sizes: list[int] = generator.integers(2, 7, GROUPS).tolist()
    prompts: list[NDArray[np.int64]] = [generator.integers(2, 64, size) for size in prompt_sizes]
    rows: list[NDArray[np.int64]] = [
        np.concatenate([prompts[group], generator.integers(2, 64, int(lens[group, idx]))])
        for group in range(GROUPS)
        for idx in range(GROUP_SIZE)
    ]
    advantages = generator.standard_normal(len(rows)).astype(np.float32)
    logprobs = [-4 + 0.3 * generator.standard_normal(len(row)) for row in rows]
    shapes = [GroupShape(len(prompts[group]), lens[group].tolist()) for group in range(GROUPS)]
    plan = plan_batch(shapes, world.world_size, num_micro_batches=micro_batches)[world.rank]
    prompt_lens = np.repeat([len(prompt) for prompt in prompts], GROUP_SIZE)[plan.samples]
    mine = [rows[idx] for idx in plan.samples]
    masks = [np.arange(len(row)) >= count for row, count in zip(mine, prompt_lens, strict=True)]
    return TrainBatch(
        tokens=np.concatenate(mine).astype(np.int32),
        offsets=np.cumsum([0, *map(len, mine)]).astype(np.int32),
        prompt_lens=prompt_lens.astype(np.int32),
        mask=np.concatenate(masks).astype(np.uint8),
        columns={
            ROLLOUT_LOGPROBS: np.concatenate([logprobs[idx] for idx in plan.samples]).astype(
                np.float32
            ),
            ADVANTAGES: np.repeat(advantages[plan.samples], [len(row) for row in mine]),
        },
        groups=NO_GROUPS,
        versions=np.ones(sum(map(len, mine)), np.int64),
        sample_ids=[f"e0/{idx // GROUP_SIZE}/{idx % GROUP_SIZE}" for idx in plan.samples],
        mini_batches=[MiniBatch(plan.micro_batches, int(lens.sum()), len(rows))],
        metrics={},
    )


def make_train_step(
    world: Mesh,
    policy: TrainModel,
    train: TrainSection,
    reference: TrainModel | None = None,
    warn: Callable[[str], None] = print,
    critic: TrainModel | None = None,
) -> TrainStep:
    others = {REFERENCE: reference, CRITIC: critic}
    models = {POLICY: policy} | {name: model for name, model in others.items() if model}
    objective = PolicyObjective(train, load_loss(train.loss))
    builder = make_builder(world, policy, train)
    settings = CRITIC_SETTINGS if critic else None
    return TrainStep(models, builder, train, objective, warn, critic=settings)


def own_loss(logprobs: torch.Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """REINFORCE, as a user would write it, with metrics of its own."""
    lens = torch.repeat_interleave(inputs.sample_lens, inputs.sample_lens).float()
    is_counted = inputs.weights > 0  # not so in padding
    metrics = {
        "own_len_mean": LossMetric(lens),
        "own_longest": LossMetric(lens, "max"),
        "own_samples": LossMetric(is_counted / lens, "sum"),
    }
    return LossOutput(-(inputs.weights * inputs.advantages * logprobs).sum(), metrics)


def make_builder(world: Mesh, policy: TrainModel, train: TrainSection) -> MicroBatchBuilder:
    return MicroBatchBuilder(
        packed=policy.is_packed,
        dtype=torch.float32,
        device=world.device,
        aggregation=train.loss_aggregation,
        max_new_tokens=MAX_NEW_TOKENS,
    )


Arrays = dict[str, NDArray[Any]]


def run_all(calls: dict[str, list[Any]], device_type: str = "cpu") -> dict[str, Any]:
    """Calls of programs in this module, `[name, *args]` each, one after the other, by their keys.

    Starting a process costs more than most programs, so many share one.
    """
    world = make_world(device_type)
    return {key: globals()[name](world, *args) for key, (name, *args) in calls.items()}


def make_world(device_type: str = "cpu") -> Mesh:
    """This process's world, on one thread."""
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    share_cores(0, 64, ())
    return Mesh.of_group(device)


def whole(tensor: Any) -> NDArray[Any]:
    """All of a tensor that may be sharded. Collective."""
    full: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().numpy().copy()


def full_parameters(policy: TrainModel) -> Arrays:
    return {name: whole(parameter.data) for name, parameter in policy.parameters.items()}


def train_and_return_parameters(
    world: Mesh,
    train: TrainSection,
    num_steps: int,
    *,
    packed: bool = True,
    wrap: Wrap = "root",
    micro_batches: int = 1,
    chunked: bool = False,
    recomputes: bool = False,
    compiles: bool = False,
    offload: Offload = "none",
    num_replicas: int = 1,
    kind: str = "qwen3",
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    warms_up: bool = False,
) -> tuple[Arrays, list[dict[str, float]]]:
    """Parameters after `num_steps` steps, whole, and the metrics of each step. A critic's have its
    name."""
    if num_replicas > 1:
        world = Mesh.of_group(world.device, num_replicas)
    make = partial(
        make_policy,
        world,
        train,
        packed=packed,
        wrap=wrap,
        kind=kind,
        recomputes=recomputes,
        compiles=compiles,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
    )
    policy, critic = make(), make(is_critic=True) if train.advantage == "gae" else None
    has_reference = train.kl_coef and not lora_rank
    reference = make_policy(world, None, packed=packed, wrap=wrap) if has_reference else None
    train_step = make_train_step(world, policy, train, reference, critic=critic)
    models = [model for model in (policy, reference, critic) if model]
    tensors = [p for model in models for p in model.parameters.values()]
    mover = HostOffload(offload, models, world.device)
    metrics: list[dict[str, float]] = []
    with scored_in_chunks() if chunked else nullcontext():
        if warms_up:
            check_warm_up(world, train_step, [model for model in (policy, critic) if model])
        for seed in range(num_steps):
            metrics.append(train_step.run(rank_batch(world, seed, micro_batches), seed))
            check_away_and_back(mover, offload, tensors, policy)
    if policy.adapters is not None:
        check_merging(policy, mover)
    values = full_parameters(critic) if critic else {}
    return full_parameters(policy) | {f"{CRITIC}/{n}": v for n, v in values.items()}, metrics


def check_warm_up(world: Mesh, train_step: TrainStep, trained: Sequence[TrainModel]) -> None:
    """It leaves neither gradients nor states, and draws no random number. Ranks differ in size."""
    before = torch.get_rng_state()
    lens = np.arange(1, MAX_NEW_TOKENS - 3 * world.rank)
    train_step.warm_up(random_batch(lens, 5, GROUP_SIZE, 64, world.rank), 0)
    assert torch.equal(torch.get_rng_state(), before)
    for model in trained:
        assert model.optimizer is not None
        assert not model.optimizer.states
        assert all(parameter.grad is None for parameter in model.parameters.values())


def check_away_and_back(
    mover: HostOffload, mode: Offload, tensors: Sequence[Any], policy: TrainModel
) -> None:
    """Everything that is to go is gone, and can be read all the same."""
    assert policy.optimizer is not None
    moments: list[Any] = [state for state in policy.optimizer.states.values() if state.ndim]
    before = [tensor.detach().to_local().clone() for tensor in (*tensors, *moments)]
    for _ in range(2):
        mover.send_away()
    for tensor in moments:
        assert (num_bytes(tensor) == 0) == (mode != "none" or tensor.to_local().numel() == 0)
    for tensor in tensors:
        if tensor.to_local().numel():  # FSDP may pad a shard without elements
            assert (num_bytes(tensor) == 0) == (mode == "all")
    for tensor, value in zip((*tensors, *moments), before, strict=True):
        assert torch.equal(mover.locate(tensor), value.to(mover.locate(tensor).device))
    for _ in range(2):
        mover.bring_back()
    for tensor, value in zip((*tensors, *moments), before, strict=True):
        assert torch.equal(mover.locate(tensor), value)
        assert torch.equal(tensor.detach().to_local(), value)


def check_merging(policy: TrainModel, mover: HostOffload) -> None:
    """Engines get the weights of an export, and the trainer has its own back, bit by bit."""
    assert policy.adapters is not None
    merging, before = MergedWeights(policy), full_parameters(policy)
    matrices = {name: torch.as_tensor(before[name]) for name in policy.stored}
    for _ in range(2):
        merging.merge()
        mover.send_away()
        sent = {name: tensor for name, tensor in policy.published.items() if name in before}
        mover.bring_back()
        assert sent.keys() == before.keys() - matrices.keys()
        for name, tensor in sent.items():
            start = torch.as_tensor(before[name])
            expected = merged(name, start, matrices, policy.adapters.scale)
            np.testing.assert_allclose(whole(tensor), expected, rtol=0, atol=1e-6, err_msg=name)
            has_changed = matrices_of(name, matrices) is not None
            assert has_changed != np.array_equal(whole(tensor), before[name]), name
        merging.restore()
        for name, value in full_parameters(policy).items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)


def num_bytes(tensor: Any) -> int:
    """Bytes of device memory of a rank's part of a DTensor."""
    return tensor.detach().to_local().untyped_storage().nbytes()


@contextmanager
def scored_in_chunks() -> Generator[None]:
    """A batch of 10 tokens."""
    with patch.object(token_scoring, "_MAX_CHUNK_LOGITS", 10 * 64):
        yield


def train_variant(world: Mesh, changes: dict[str, Any], options: dict[str, Any]) -> Any:
    """Three steps with changes to `TRAIN`; [parameters, metrics of each step]."""
    return train_and_return_parameters(world, replace(TRAIN, **changes), 3, **options)


def normalized(of_ranks: list[list[float]]) -> NDArray[np.float32]:
    """This rank's advantages, normalized over those of all ranks."""
    world = make_world()
    return normalize_over_batch(torch.tensor(of_ranks[world.rank])).numpy()


def half_precision_scores(world: Mesh, packed: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Results for a fixed batch on one rank, in bfloat16: [M] logprobs, in the order of the batch,
    and the gradient of their sum for the first layer's keys."""
    model = make_model(head_dim=16, hidden_size=64)
    if packed:
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)
    passes = PassSettings(compute_dtype=torch.bfloat16)
    policy = TrainModel(PreparedModel(model, packed), world.fsdp, passes, TRAIN)
    builder = MicroBatchBuilder(
        packed=packed,
        dtype=torch.bfloat16,
        device=world.device,
        aggregation="token",
        max_new_tokens=MAX_NEW_TOKENS,
    )
    ((micro_batch,),) = builder.build(rank_batch(world, 3, 1))
    scores = policy.score(micro_batch)
    torch.autograd.backward(scores.logprobs.sum())
    (of_keys,) = (p for n, p in policy.parameters.items() if "layers.0.self_attn.k_proj" in n)
    assert of_keys.grad is not None
    return whole(scores.logprobs), whole(of_keys.grad)


def save_after_two_steps(world: Mesh, folder: str, **changes: Any) -> Arrays:
    """Trains two steps and saves; returns what was saved."""
    train = replace(TRAIN, **changes)
    policy = make_policy(world, train)
    train_step = make_train_step(world, policy, train)
    for seed in range(2):
        train_step.run(rank_batch(world, seed, 1), seed)
    state = TrainerState(step=2, version=7, world_size=world.world_size, seed=0, ledger="1-0-512")
    CheckpointStore(Path(folder), world, keep=2).save(state, {POLICY: policy})
    return full_parameters(policy) | full_moments(policy)


def save_average(world: Mesh, folder: str) -> Arrays:
    """The same with a moving average, whose parts are returned by parameter."""
    saved = save_after_two_steps(world, folder, ema=0.5)
    return {n.removesuffix(".ema"): value for n, value in saved.items() if n.endswith(".ema")}


def save_and_load_with_an_unused_parameter(world: Mesh, folder: str) -> list[bool]:
    """Whether each tensor loaded after a step equals the saved one."""
    kept: list[Arrays] = []
    for is_first in (True, False):
        model = make_model()
        model.model.unused = torch.nn.Parameter(torch.ones(4))
        passes = PassSettings(compute_dtype=torch.float32)
        policy = TrainModel(PreparedModel(model, False), world.fsdp, passes, TRAIN)
        train_step = make_train_step(world, policy, TRAIN)
        store = CheckpointStore(Path(folder), world, keep=2)
        if is_first:
            train_step.run(rank_batch(world, 0, 1), 0)
            state = TrainerState(step=1, version=1, world_size=world.world_size, seed=0)
            store.save(state, {POLICY: policy})
        else:
            store.load(store.folder / "step-000001", {POLICY: policy})
        kept.append(full_parameters(policy) | full_moments(policy))
    saved, loaded = kept
    return [np.array_equal(saved[name], loaded[name]) for name in loaded]


def full_moments(policy: TrainModel) -> Arrays:
    assert policy.optimizer is not None
    return {name: whole(value) for name, value in policy.optimizer.states.items()}


def load_checkpoint(world: Mesh, path: str) -> list[Any]:
    """Loads into a policy with other weights; returns what was loaded."""
    policy = make_policy(world)
    for parameter in policy.parameters.values():
        parameter.data.fill_(0.5)
    store = CheckpointStore(Path(path).parent, world, keep=2)
    state = store.load(Path(path), {POLICY: policy})
    return [asdict(state), full_parameters(policy) | full_moments(policy)]


def load_into_another_model(world: Mesh, path: str) -> str:
    """The error when a checkpoint does not fit."""
    policy = make_policy(world, packed=False, kind="llama")
    store = CheckpointStore(Path(path).parent, world, keep=2)
    return said_by(lambda: store.load(Path(path), {POLICY: policy}))


def load_other_adapters(world: Mesh, folder: str) -> dict[str, str]:
    """The errors when the adapters of a checkpoint are not those of a model."""

    def policy(base: str, *targets: str, alpha: float = 32.0) -> TrainModel:
        model, section = make_model(), LoraSection(rank=2, alpha=alpha, targets=targets)
        adapters = LoraAdapters(model, section, torch.float32)
        origin = {"lora": to_wire(section), "base": base}
        prepared = PreparedModel(model, False, None, adapters, origin)
        return TrainModel(prepared, world.fsdp, PassSettings(compute_dtype=torch.float32), TRAIN)

    state = TrainerState(step=1, version=1, world_size=world.world_size, seed=0)
    store = CheckpointStore(Path(folder), world, keep=1)
    path = store.save(state, {POLICY: policy("a", "q_proj", "v_proj")})
    others = {
        "same": policy("a", "q_proj", "v_proj"),
        "reordered": policy("a", "v_proj", "q_proj"),
        "fewer": policy("a", "q_proj"),
        "more": policy("a"),
        "scale": policy("a", "q_proj", "v_proj", alpha=16.0),
        "base": policy("b", "q_proj", "v_proj"),
        "none": make_policy(world, packed=False),
    }

    def load(model: TrainModel) -> None:
        store.load(path, {POLICY: model})

    return {name: said_by(partial(load, other)) for name, other in others.items()}


def load_damaged(world: Mesh, checkpoint: str, folder: str) -> dict[str, str]:
    """The errors when a file of a checkpoint is damaged, by file and damage."""
    policy = make_policy(world)
    store = CheckpointStore(Path(folder), world, keep=1)

    def damage_and_load(name: str, kept: float | None) -> str:
        copy = Path(folder) / f"{name}-{kept}"
        from_lead(world, lambda: _copy_damaged(Path(checkpoint), copy, name, kept))
        return said_by(lambda: store.load(copy, {POLICY: policy}))

    files = ("__0_0.distcp", "__1_0.distcp", ".metadata", "trainer.json")
    done = {"halved": 0.5, "emptied": 0.0, "removed": None}
    return {
        f"{name} {what}": damage_and_load(name, kept)
        for name in files
        for what, kept in done.items()
    }


def _copy_damaged(checkpoint: Path, copy: Path, name: str, kept: float | None) -> None:
    shutil.copytree(checkpoint, copy)
    if kept is None:
        (copy / name).unlink()
    else:
        os.truncate(copy / name, int((copy / name).stat().st_size * kept))


def find_flipped_bits(world: Mesh, checkpoint: str, folder: str) -> dict[str, str]:
    """The damage that is found in copies with a flipped bit, by file; "intact" has none."""
    store = CheckpointStore(Path(folder), world, keep=1)

    def damage_of(name: str) -> str:
        copy = Path(folder) / name
        from_lead(world, lambda: _copy_flipped(Path(checkpoint), copy, name))
        return store.find_damage(copy)

    files = ("__0_0.distcp", "__1_0.distcp", ".metadata", "trainer.json")
    intact = store.find_damage(Path(checkpoint))
    return {"intact": intact} | {name: damage_of(name) for name in files}


def _copy_flipped(checkpoint: Path, copy: Path, name: str) -> None:
    shutil.copytree(checkpoint, copy)
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 4
    (copy / name).write_bytes(data)


def said_by(action: Callable[[], object]) -> str:
    """The error that `action` raises, in words; "" where it does not."""
    try:
        action()
    except UmbraError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_many(world: Mesh, folder: str, steps: list[int], keep: int) -> None:
    policy = make_policy(world)
    store = CheckpointStore(Path(folder), world, keep)
    for step in steps:
        state = TrainerState(step=step, version=step, world_size=world.world_size, seed=0)
        store.save(state, {POLICY: policy})


def save_anew_cut_short(world: Mesh, folder: str, step: int) -> str:
    """Saves a step that has a checkpoint, and fails while that is removed; returns the error."""
    with patch.object(shutil, "rmtree", side_effect=OSError("cut short")):
        return said_by(lambda: save_many(world, folder, [step], keep=2))


def fail_to_save(world: Mesh, folder: str) -> str:
    """The error when a checkpoint cannot be written."""
    return said_by(lambda: save_many(world, folder, [1], keep=1))


def save_as_the_disk_fills_up(world: Mesh, disk: str) -> list[tuple[str, list[str]]]:
    """Saves three times onto a small disk that is as good as full then, and once it is not.

    Returns, for each: what is said, and the files that are there.
    """
    folder, junk = Path(disk) / "checkpoints", Path(disk) / "junk"
    policy = make_policy(world)
    numels = [int(parameter.numel()) for parameter in policy.parameters.values()]
    nbytes = sum(3 * 4 * numel + 4 for numel in numels)  # with two moments, and the step

    def save(step: int, left_nbytes: int) -> tuple[str, list[str]]:
        from_lead(world, lambda: leave_room(junk, left_nbytes))
        said = said_by(lambda: save_many(world, str(folder), [step], keep=1))
        barrier()
        return said, sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

    first = save(1, 4 * nbytes)
    # A little more than the tensors take, but each of their records takes some hundreds of bytes.
    return [first, save(2, nbytes // 2), save(2, nbytes + 4096), save(2, 4 * nbytes)]


def leave_room(junk: Path, left_nbytes: int) -> None:
    """Has a file take what more of its disk is free."""
    junk.unlink(missing_ok=True)
    stats = os.statvfs(junk.parent)
    junk.write_bytes(bytes(max(0, stats.f_frsize * stats.f_bavail - left_nbytes)))


def export_onto(world: Mesh, source: str, disk: str, left: list[int]) -> list[str]:
    """Exports a model to disks with so much space left; returns the errors."""
    said: list[str] = []
    for left_nbytes in left:
        leave_room(Path(disk) / "junk", left_nbytes)
        target = f"{disk}/export"
        said.append(said_by(lambda: export_model(world, source, target, "float32")))  # noqa: B023
    return said


def export_model(world: Mesh, source: str, target: str, dtype: str) -> None:
    """Loads the model directory, and exports it again."""
    model, is_packed = load_whole_model(ModelSection(path=Path(source)), torch.float32)
    passes = PassSettings(compute_dtype=torch.float32)
    policy = TrainModel(PreparedModel(model, is_packed), world.fsdp, passes)
    section = ModelSection(path=Path(source))
    export_policy(policy, Path(target), world, source=section, dtype=getattr(torch, dtype))


def export_merged(world: Mesh, source: str, folder: str) -> Arrays:
    """Saves and exports float32 adapters of bfloat16 weights; returns the weights for engines."""
    section = ModelSection(path=Path(source), dtype="bfloat16", lora=LoraSection(rank=4))
    model, is_packed = load_whole_model(section, torch.bfloat16)
    adapters = LoraAdapters(model, section.lora, torch.float32)
    prepared = PreparedModel(model, is_packed, None, adapters, origin(section), path=section.path)
    policy = TrainModel(prepared, world.fsdp, PassSettings(compute_dtype=torch.bfloat16), TRAIN)
    for matrix in policy.stored.values():
        torch.nn.init.normal_(local_part(matrix), std=0.1)
    state = TrainerState(step=1, version=1, world_size=world.world_size, seed=0, **policy.origin)
    CheckpointStore(Path(folder), world, keep=1).save(state, {POLICY: policy})
    export_policy(policy, Path(folder) / "export", world, source=section, dtype=torch.bfloat16)
    MergedWeights(policy).merge()
    return {name: whole(tensor.float()) for name, tensor in policy.published.items()}


def export_beside_leftovers(world: Mesh, source: str, target: str) -> list[str]:
    """Exports where killed exports left folders, one of a process with the same id as this one.

    Returns the hidden names that are there afterwards, without that one.
    """
    place = Path(target)
    of_same_pid = place.with_name(f".{place.name}.{os.getpid()}")
    for leftover in (of_same_pid, place.with_name(f".{place.name}.new")):
        leftover.mkdir()
        (leftover / "model.safetensors").write_text("half")
    export_model(world, source, target, "float32")
    shutil.rmtree(of_same_pid)
    return sorted(path.name for path in place.parent.glob(f".{place.name}*"))


def raise_on_lead(world: Mesh) -> str:
    def fail() -> None:
        raise UmbraError("only rank 0 knows")

    return said_by(lambda: from_lead(world, fail))


def metrics_that_differ(world: Mesh) -> str:
    """The error for a loss that returns another metric on each rank."""
    totals = MetricTotals()
    totals.add({f"of_rank_{world.rank}": LossMetric(torch.ones(1))}, torch.ones(1))
    return said_by(totals.reduce)


def signals_agreed_on(world: Mesh) -> list[str]:
    """The agreed signal when only rank 1 received one, and when none did."""
    only_here = signal.SIGINT if world.rank == 1 else None
    return [agree_on_signal(received) for received in (only_here, None)]
