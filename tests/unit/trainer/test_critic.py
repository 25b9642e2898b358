"""PPO's critic against plain loops in float64, also over several turns."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed
from minimal_config import config_with
from numpy.typing import NDArray
from test_packing import builder, make_batch, random_samples
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_models import listed, make_model, save_model

from umbra.runtime.errors import UmbraError
from umbra.trainer.algorithms.advantages import gae, rewards_at_ends, sums_to_go, value_loss
from umbra.trainer.algorithms.losses import clipped_loss
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, TOKEN_ADVANTAGES
from umbra.trainer.config.trainer_config import CriticSection, LoraSection, TrainSection
from umbra.trainer.critic import add_gae
from umbra.trainer.data.train_batch import (
    ADVANTAGES,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    RETURNS,
    ROLLOUT_LOGPROBS,
    VALUES,
    MiniBatch,
    TrainBatch,
)
from umbra.trainer.learning import load_models, make_train_step
from umbra.trainer.model.lora_layers import LoraAdapters
from umbra.trainer.model.micro_batches import MicroBatch
from umbra.trainer.model.model_loading import load_model, replace_head
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.train_model import CRITIC, POLICY, PassSettings, PreparedModel, TrainModel
from umbra.trainer.objective import PolicyObjective
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh

_dist: Final[Any] = torch.distributed
CPU: Final = torch.device("cpu")
LENS = [1, 7, 4, 30, 2]


@pytest.fixture
def mesh() -> Generator[DeviceMesh]:
    _dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield Mesh.of_group(CPU).fsdp
    finally:
        _dist.destroy_process_group()


def gae_by_hand(
    rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float
) -> list[float]:
    """Of one sample, from its end."""
    advantages, advantage, following = list[float](), 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * following - value
        advantage = delta + gamma * lam * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5)])
def test_advantages_are_those_of_the_recursion_from_the_end(gamma: float, lam: float) -> None:
    rewards, values = drawn(2, sum(LENS))

    found = gae(rewards, values, torch.tensor(LENS), gamma, lam)

    parts = zip(*(torch.split(each, LENS) for each in (rewards, values)), strict=True)
    expected = [gae_by_hand(listed(r), listed(v), gamma, lam) for r, v in parts]
    assert listed(found) == pytest.approx([*chain(*expected)], rel=1e-12, abs=1e-12)


def test_a_long_sample_s_sums_are_exact_and_a_reward_is_its_last_token_s() -> None:
    lens = torch.tensor([5000, 1, 700])
    terms = drawn(5701)

    sums = sums_to_go(terms, lens, 0.999)
    rewards = rewards_at_ends(torch.repeat_interleave(torch.tensor([1.0, 2.0, 3.0]), lens), lens)

    expected, total = list[float](), 0.0
    for place in reversed(range(5701)):
        total = float(terms[place]) + (0.0 if place in (4999, 5000, 5700) else 0.999 * total)
        expected.append(total)
    assert listed(sums) == pytest.approx(expected[::-1], rel=1e-10, abs=1e-10)
    assert {place: float(rewards[place]) for place in listed(rewards.nonzero()[:, 0])} == {
        4999: 1.0,
        5000: 2.0,
        5700: 3.0,
    }


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_is_the_larger_error_of_the_value_and_the_clipped_one(clip: float) -> None:
    values, old, returns, weights = drawn(4, 40)
    values, weights = (old + 0.3 * values).requires_grad_(), weights.abs()

    output = value_loss(values, old, returns, weights, clip)
    (gradient,) = torch.autograd.grad(output.loss, values)

    loss, slopes, clipped = 0.0, list[float](), list[bool]()
    for value, before, wanted, weight in zip(
        listed(values), listed(old), listed(returns), listed(weights), strict=True
    ):
        error, is_clipped = (value - wanted) ** 2, False
        if clip:
            near = min(max(value, before - clip), before + clip)
            is_clipped = (near - wanted) ** 2 > error
            error = max(error, (near - wanted) ** 2)
        loss += 0.5 * weight * error
        clipped.append(is_clipped)
        slopes.append(0.0 if is_clipped else weight * (value - wanted))
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-12)
    assert listed(gradient) == pytest.approx(slopes, rel=1e-12)
    assert listed(output.metrics["clipped_share"].values) == clipped
    assert any(clipped) == bool(clip)


def with_turns(batch: TrainBatch) -> TrainBatch:
    """Every third and fourth token of a completion is a tool's, but for the first and the last."""
    mask = batch.mask.copy()
    for idx in range(len(batch.prompt_lens)):
        span = batch.span(idx)
        for place in range(span.start + int(batch.prompt_lens[idx]) + 1, span.stop - 1):
            if (place - span.start) % 4 > 1:
                mask[place] = 0
    (whole,) = batch.mini_batches
    return replace(
        batch,
        mask=mask,
        mini_batches=[MiniBatch(whole.micro_batches, int(mask.sum()), whole.num_samples)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_tools_tokens_are_skipped_and_the_kl_is_in_each_token_s_reward(
    mesh: DeviceMesh, kl_in_reward: bool
) -> None:
    """As verl has it: over all tokens, where those of a tool leave both sums as they are."""
    batch = with_turns(make_batch(random_samples(3, [4, 3], [9, 12, 1, 7], group_size=2)))
    values, proximal, reference = drawn(3, len(batch.tokens)).numpy()
    names = {VALUES: values, PROXIMAL_LOGPROBS: proximal, REFERENCE_LOGPROBS: reference}
    batch.columns.update(names)
    ((micro_batch,),) = builder(packed=True).build(batch)
    critic = CriticSection(gamma=0.98, lam=0.9, returns_lam=0.97)
    train = TrainSection(
        steps=1, advantage="gae", advantage_norm="batch", kl_coef=0.3, kl_in_reward=kl_in_reward
    )

    metrics = add_gae([micro_batch], critic, train)()

    advantages, returns = np.zeros(len(values)), np.zeros(len(values))
    for idx in range(len(batch.prompt_lens)):
        span = batch.span(idx)
        reward = float(batch.columns[ADVANTAGES][span.start])
        for lam, into in ((critic.lam, advantages), (critic.returns_lam, returns)):
            following = total = 0.0
            for place in reversed(range(span.start, span.stop)):
                if not batch.mask[place]:
                    continue
                gained = reward if place == span.stop - 1 else 0.0
                if kl_in_reward:
                    gained -= 0.3 * (proximal[place] - reference[place])
                delta = gained + critic.gamma * following - values[place]
                total = delta + critic.gamma * lam * total
                into[place], following = total, values[place]
    returns += values
    generated = batch.mask == 1
    own = advantages[generated]
    advantages = (advantages - own.mean()) / (own.std(ddof=1) + 1e-4)
    columns, places = micro_batch.columns, micro_batch.places
    np.testing.assert_allclose(columns[ADVANTAGES].numpy(), advantages[places], rtol=1e-5)
    np.testing.assert_allclose(columns[RETURNS].numpy(), returns[places], rtol=1e-12)
    returns, values = returns[generated], values[generated]
    explained = 1 - (returns - values).var() / returns.var()
    assert metrics == pytest.approx(
        {
            "critic/return_mean": returns.mean(),
            "critic/value_mean": values.mean(),
            "critic/explained_variance": explained,
        }
    )


def test_a_batch_without_a_token_to_train_on_leaves_all_as_it_is(mesh: DeviceMesh) -> None:
    batch = make_batch(random_samples(3, [4], [3, 5], group_size=2))
    batch = replace(batch, mask=np.zeros_like(batch.mask))
    batch.columns[VALUES] = np.ones(len(batch.tokens), np.float32)
    ((micro_batch,),) = builder(packed=True).build(batch)
    train = TrainSection(steps=1, advantage="gae", advantage_norm="batch")

    assert add_gae([micro_batch], CriticSection(), train)() == {}


def test_the_host_waits_for_no_advantage() -> None:
    batch = make_batch(random_samples(3, [4], [3, 5], group_size=2))
    batch.columns[VALUES] = batch.columns[PROXIMAL_LOGPROBS] = np.ones(
        len(batch.tokens), np.float32
    )
    batch.columns[REFERENCE_LOGPROBS] = batch.columns[VALUES]
    whole = builder(packed=True).build(batch)
    train = TrainSection(
        steps=1, advantage="gae", advantage_norm="batch", kl_coef=0.3, kl_in_reward=True
    )
    # Tensors on this device have no values: to read one raises.
    micro_batches = [on_meta(each) for each in chain(*whole)]

    metrics = add_gae(micro_batches, CriticSection(), train)

    with pytest.raises(NotImplementedError, match="no data"):
        metrics()


def on_meta(micro_batch: MicroBatch) -> MicroBatch:
    return replace(
        micro_batch,
        columns={name: each.to("meta") for name, each in micro_batch.columns.items()},
        weights=micro_batch.weights.to("meta"),
        sample_lens=micro_batch.sample_lens.to("meta"),
    )


@pytest.mark.parametrize(("reward", "gamma"), [(0.1, 1.0), (0.0, 0.99)])
def test_equal_returns_have_no_variance_to_explain(
    mesh: DeviceMesh, reward: float, gamma: float
) -> None:
    batch = make_batch(random_samples(3, [4], [3, 5], group_size=2))
    batch.columns[ADVANTAGES][:] = reward
    batch.columns[VALUES] = drawn(len(batch.tokens)).numpy().astype(np.float32)
    ((micro_batch,),) = builder(packed=True).build(batch)

    critic, train = CriticSection(gamma=gamma), TrainSection(steps=1, advantage="gae")
    metrics = add_gae([micro_batch], critic, train)()

    assert "critic/explained_variance" not in metrics
    assert metrics["critic/return_mean"] == pytest.approx(reward, abs=1e-7)


TRAIN = TrainSection(
    steps=9, learning_rate=0.02, eps=0.01, max_grad_norm=0.5, updates_per_batch=2, advantage="gae"
)
SETTINGS = CriticSection(learning_rate=0.05, warmup_steps=1, value_clip=0.05, gamma=0.99, lam=0.9)


def make_models(mesh: DeviceMesh, train: TrainSection, *, packed: bool) -> dict[str, TrainModel]:
    """In float64; both have the same decoder."""
    models: dict[str, TrainModel] = {}
    passes = PassSettings(compute_dtype=torch.float64)
    rates = {POLICY: train.learning_rate, CRITIC: SETTINGS.learning_rate}
    for name, rate in rates.items():
        model = make_model("llama").double()
        if packed:
            register_packed_attention()
            model.set_attn_implementation(PACKED_ATTENTION)
        if name == CRITIC:
            replace_head(model, torch.float64)
        prepared = PreparedModel(model, packed, is_critic=name == CRITIC)
        models[name] = TrainModel(prepared, mesh, passes, replace(train, learning_rate=rate))
    return models


def batch_of(seed: int) -> TrainBatch:
    """Two mini-batches of one prompt each, as micro-batches of one sample and of two."""
    batch = with_turns(make_batch(random_samples(seed, [4, 3], [9, 12, 1, 2, 7, 5], group_size=3)))
    logprobs = -4 + 0.3 * drawn(len(batch.tokens), seed=seed).numpy()
    batch.columns[ROLLOUT_LOGPROBS] = logprobs.astype(np.float32)
    batch.columns[ADVANTAGES] *= np.float32(0.3)
    counts = [int(batch.mask[batch.span(idx)].sum()) for idx in range(6)]
    parts = [([[0], [1, 2]], sum(counts[:3]), 3), ([[5, 3], [4]], sum(counts[3:]), 3)]
    return replace(batch, mini_batches=[MiniBatch(*part) for part in parts])


class PlainPpo:
    """Policy, value head and updates as a person would write them for one sample at a time."""

    def __init__(self) -> None:
        self.policy, self.critic = make_model("llama").double(), make_model("llama").double()
        replace_head(self.critic, torch.float64)
        torch.nn.init.zeros_(self.critic.lm_head.weight)
        self.metrics: list[dict[str, float]] = []

    def train(self, num_steps: int) -> None:
        optimizers: list[Any] = [
            torch.optim.AdamW(list(model.parameters()), lr=rate, eps=0.01, weight_decay=0.0)
            for model, rate in ((self.policy, 0.02), (self.critic, 0.05))
        ]
        for step in range(num_steps):
            batch = batch_of(step)
            with torch.no_grad():
                old = [self.values(batch, idx) for idx in range(6)]
            targets: list[tuple[Tensor, Tensor]] = []
            for idx, values in enumerate(old):
                reward = float(batch.columns[ADVANTAGES][batch.span(idx).start])
                rewards = [0.0] * (len(values) - 1) + [reward]
                found = [gae_by_hand(rewards, listed(values), 0.99, lam) for lam in (0.9, 1.0)]
                advantages, for_returns = (
                    torch.tensor(each, dtype=torch.float64) for each in found
                )
                targets.append((advantages, values + for_returns))
            for _ in range(2):
                for mini_batch in batch.mini_batches:
                    members = [*chain(*mini_batch.micro_batches)]
                    losses = [torch.zeros(()), torch.zeros(())]
                    for idx in members:
                        advantages, returns = targets[idx]
                        ratio = (self.logprobs(batch, idx) - self.sampled(batch, idx)).exp()
                        bounded = ratio.clamp(0.8, 1.2) * advantages
                        losses[0] = losses[0] - torch.minimum(ratio * advantages, bounded).sum()
                        values = self.values(batch, idx)
                        near = old[idx] + (values - old[idx]).clamp(-0.05, 0.05)
                        errors = [(each - returns).square() for each in (values, near)]
                        losses[1] = losses[1] + 0.5 * torch.maximum(*errors).sum()
                    for idx, optimizer in enumerate(optimizers):
                        if idx == 0 and step == 0:  # the warm-up
                            continue
                        optimizer.zero_grad()
                        torch.autograd.backward(losses[idx] / mini_batch.num_tokens)
                        parameters = [p for g in optimizer.param_groups for p in g["params"]]
                        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                        optimizer.step()

    def sampled(self, batch: TrainBatch, idx: int) -> Tensor:
        return torch.as_tensor(
            batch.columns[ROLLOUT_LOGPROBS][batch.span(idx)][self.at(batch, idx)]
        )

    def at(self, batch: TrainBatch, idx: int) -> NDArray[np.int64]:
        return np.flatnonzero(batch.mask[batch.span(idx)])

    def tokens(self, batch: TrainBatch, idx: int) -> Tensor:
        return torch.as_tensor(batch.tokens[batch.span(idx)].astype(np.int64))

    def values(self, batch: TrainBatch, idx: int) -> Tensor:
        """The critic's number at the token before each generated one."""
        output = self.critic(input_ids=self.tokens(batch, idx)[None]).logits[0, :, 0]
        return output[self.at(batch, idx) - 1]

    def logprobs(self, batch: TrainBatch, idx: int) -> Tensor:
        tokens, places = self.tokens(batch, idx), self.at(batch, idx)
        output = self.policy(input_ids=tokens[None]).logits[0].log_softmax(-1)
        return output[places - 1, tokens[places]]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_steps_train_policy_and_critic_as_a_plain_loop_does(mesh: DeviceMesh, packed: bool) -> None:
    models = make_models(mesh, TRAIN, packed=packed)
    objective = PolicyObjective(TRAIN, clipped_loss)
    dtype = torch.float64
    step = TrainStep(
        models, builder(packed, dtype), TRAIN, objective, print, check=None, critic=SETTINGS
    )
    plain = PlainPpo()

    metrics = [step.run(batch_of(seed), seed) for seed in range(3)]
    plain.train(3)

    for name, model in ((POLICY, plain.policy), (CRITIC, plain.critic)):
        expected = dict(model.named_parameters())
        for parameter, value in models[name].parameters.items():
            whole: Any = value
            torch.testing.assert_close(
                whole.full_tensor(), expected[parameter], atol=2e-6, rtol=0, msg=parameter
            )
    first, *later = metrics
    assert not [name for name in first if name.startswith("train/")]  # the warm-up
    assert first["critic/value_mean"] == 0.0
    assert all({"train/loss", "critic/loss", "critic/grad_norm"} <= row.keys() for row in later)
    assert later[-1]["critic/clipped_share"] >= 0.0


@pytest.mark.slow
def test_the_policy_s_schedule_begins_after_the_critic_s_warm_up(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    save_model(tmp_path, "llama")
    settings = "model.dtype=float64 train.advantage=gae critic.warmup_steps=2 train.steps=7"
    schedule = "train.schedule=linear train.warmup_steps=2"
    config, world = config_with(f"{settings} {schedule}", model_dir=tmp_path), Mesh.of_group(CPU)
    models = load_models(config, world, ProgressDisplay(None))
    step = make_train_step(config, world, models, clipped_loss, print, check=None)

    metrics = [step.run(batch_of(seed), seed) for seed in range(7)]

    rates = [row.get("train/learning_rate", 0.0) / config.train.learning_rate for row in metrics]
    assert rates == pytest.approx([0, 0, 0.5, 1, 1, 2 / 3, 1 / 3])
    rates = [row["critic/learning_rate"] / config.critic.learning_rate for row in metrics]
    assert rates == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2])


def double(
    micro_batches: Sequence[MicroBatch], critic: CriticSection | None, train: TrainSection
) -> Callable[[], dict[str, float]]:
    assert critic is None
    for micro_batch in micro_batches:
        micro_batch.columns[ADVANTAGES] = 2 * micro_batch.columns[ADVANTAGES]
    return lambda: {"train/doubled": float(len(micro_batches))}


@pytest.mark.slow
def test_advantages_of_tokens_need_no_critic(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in (ADVANTAGE_ESTIMATORS, TOKEN_ADVANTAGES):
        monkeypatch.setitem(names, "doubled", f"{__name__}:double")  # pyright: ignore[reportArgumentType]
    losses = list[float]()

    for name in ("reinforce", "doubled"):
        train = replace(TRAIN, advantage=name)
        models = {POLICY: make_models(mesh, train, packed=True)[POLICY]}
        objective = PolicyObjective(train, clipped_loss)
        step = TrainStep(models, builder(True, torch.float64), train, objective, print)
        batch = make_batch(random_samples(3, [4], [3, 5], group_size=2))
        batch.columns[ROLLOUT_LOGPROBS][:] = -4
        metrics = step.run(batch, 0)
        assert metrics.get("train/doubled") == (1.0 if name == "doubled" else None)
        losses.append(metrics["train/loss"])

    assert losses[1] == pytest.approx(2 * losses[0]) != 0


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", ' model.lora.rank=2 model.lora.targets=["q_proj","lm_head"]'])
def test_a_critic_is_the_starting_model_with_a_head_of_its_own(
    mesh: DeviceMesh, tmp_path: Path, lora: str
) -> None:
    model = make_model("llama")  # whose head is not its embeddings
    save_model(tmp_path / "model", "llama")
    settings = f"model.dtype=float32 train.advantage=gae critic.learning_rate=0.5{lora}"
    config = config_with(settings, model_dir=tmp_path / "model").of_critic

    critic = load_model(config, mesh, trains=True, is_critic=True)

    files, found = dict(model.named_parameters()), critic.parameters
    for name in files.keys() - {"lm_head.weight"}:
        whole: Any = found[name]
        assert torch.equal(whole.full_tensor(), files[name]), name
    head: Any = found["lm_head.weight"]
    assert torch.equal(head.full_tensor(), torch.zeros(1, 32))
    trained = {name for name, each in found.items() if each.requires_grad}
    assert trained == set(critic.stored)
    assert "lm_head.weight" in trained
    assert len(trained) == (5 if lora else len(files))
    assert critic.step(0)["learning_rate"] == 0.5


@pytest.mark.slow
def test_a_critic_s_gradient_that_is_not_finite_is_named_and_leaves_it_as_it_is(
    mesh: DeviceMesh,
) -> None:
    models = make_models(mesh, TRAIN, packed=True)
    objective = PolicyObjective(TRAIN, clipped_loss)
    dtype = torch.float64
    step = TrainStep(models, builder(True, dtype), TRAIN, objective, print, critic=SETTINGS)
    critic: Any = models[CRITIC].parameters["lm_head.weight"]
    before = critic.full_tensor().clone()
    batch = batch_of(0)
    batch.columns[ADVANTAGES][batch.span(1)] = np.inf

    with pytest.raises(UmbraError) as raised:
        step.run(batch, 0)

    said = "step 1: the critic's gradient is not finite (norm nan): sample e0/1/0 (prompt 1) is the"
    assert str(raised.value).startswith(said)
    assert "lower critic.learning_rate" in str(raised.value)
    assert torch.equal(critic.full_tensor(), before)


@pytest.mark.slow
def test_a_critic_with_adapters_trains_these_and_its_head(mesh: DeviceMesh) -> None:
    model = make_model("llama")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    adapters = LoraAdapters(model, LoraSection(rank=2), torch.float32)
    replace_head(model, torch.float32)
    passes = PassSettings(compute_dtype=torch.float32)
    critic = TrainModel(
        PreparedModel(model, False, None, adapters, is_critic=True), mesh, passes, TRAIN
    )
    ((micro_batch,),) = builder(packed=False).build(make_batch(random_samples(1, [3], [4], 1)))

    for step in range(2):
        scores = critic.score(micro_batch)
        critic.backward((scores.logprobs - 1.0).square().sum(), is_last=True)
        critic.step(step)

    moved = {
        name
        for name, value in critic.stored.items()
        if float(value.detach().abs().max()) > 0 and "lora_A" not in name
    }
    assert "lm_head.weight" in moved
    assert len([name for name in moved if "lora_B" in name]) == 14
    for name, value in critic.parameters.items():
        if name in before and name != "lm_head.weight":
            whole: Any = value
            assert torch.equal(whole.full_tensor(), before[name]), name
