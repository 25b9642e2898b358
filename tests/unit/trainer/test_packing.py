"""Packed and padded forward passes against the model itself, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from training_models import listed, make_model

from umbra.runtime.errors import ConfigError
from umbra.trainer.data.train_batch import (
    ADVANTAGES,
    ROLLOUT_LOGPROBS,
    MiniBatch,
    RewardGroups,
    TrainBatch,
)
from umbra.trainer.model import packing
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.packed_attention import (
    PACKED_ATTENTION,
    packed_attention,
    register_packed_attention,
)
from umbra.trainer.model.packing import PackedInputs, Sample, pack, packing_order
from umbra.trainer.model.train_model import (
    PassSettings,
    _Scorer,  # pyright: ignore[reportPrivateUsage]
)

CPU = torch.device("cpu")
PASSES = PassSettings(compute_dtype=torch.float32)


def make_batch(samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TrainBatch:
    """One micro-batch of (prompt, completion) pairs; every completion token is generated."""
    rows = [np.asarray([*prompt, *completion], np.int32) for prompt, completion in samples]
    masks = [np.r_[np.zeros(len(p)), np.ones(len(c))] for p, c in samples]
    mask = np.concatenate(masks).astype(np.uint8)
    count = len(samples)
    return TrainBatch(
        tokens=np.concatenate(rows),
        offsets=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        prompt_lens=np.asarray([len(p) for p, _ in samples], np.int32),
        mask=mask,
        columns={
            ROLLOUT_LOGPROBS: (np.arange(len(mask)) * mask).astype(np.float32),
            ADVANTAGES: np.repeat(np.arange(count, dtype=np.float32), [len(row) for row in rows]),
        },
        groups=RewardGroups(
            np.zeros((1, 0), np.float32), np.zeros(1, np.int32), np.zeros(0, np.int32)
        ),
        versions=np.ones(len(mask), np.int64),
        sample_ids=[f"e0/{idx}/0" for idx in range(count)],
        mini_batches=[MiniBatch([list(range(count))], int(mask.sum()), count)],
        metrics={},
    )


def builder(packed: bool, dtype: torch.dtype = torch.float32) -> MicroBatchBuilder:
    return MicroBatchBuilder(
        packed=packed, dtype=dtype, device=CPU, aggregation="token", max_new_tokens=64
    )


def random_samples(
    seed: int, prompt_lens: Sequence[int], lens: Sequence[int], group_size: int
) -> list[tuple[list[int], list[int]]]:
    generator = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return generator.integers(2, 64, count).tolist()

    prompts = [draw(count) for count in prompt_lens]
    return [(prompts[idx // group_size], draw(count)) for idx, count in enumerate(lens)]


def reference_logprobs(model: Any, batch: TrainBatch) -> dict[int, Tensor]:
    """Logprobs by index in the batch's tokens, each sample alone, with eager attention."""
    found: dict[int, Tensor] = {}
    for idx in range(len(batch.prompt_lens)):
        start, stop = batch.offsets[idx], batch.offsets[idx + 1]
        tokens = torch.as_tensor(batch.tokens[start:stop].astype(np.int64))
        logprobs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        for place in range(int(batch.prompt_lens[idx]), len(tokens)):
            found[int(start) + place] = logprobs[place - 1, tokens[place]]
    return found


CASES = {
    "equal lengths": ([5, 5], [7] * 8, 4),
    "mixed lengths": ([3, 9, 4], [1, 20, 2, 19, 7, 7, 1, 30, 12], 3),
    "one prompt": ([6], [4, 9, 5, 8], 4),
    "single tokens": ([1, 1], [1, 1], 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "deepseek-v3"])
@pytest.mark.parametrize("packed", [True, False])
def test_scores_and_gradients_are_those_of_the_model(kind: str, case: str, packed: bool) -> None:
    batch = make_batch(random_samples(1, *CASES[case]))
    model = make_model(kind)
    expected = reference_logprobs(model, batch)
    ((micro_batch,),) = builder(packed).build(batch)
    places = listed(micro_batch.columns[ROLLOUT_LOGPROBS].long())  # `make_batch` numbers them
    if packed:
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)

    logprobs, entropy = _Scorer(model, PASSES)(micro_batch.inputs, micro_batch.targets, "measured")

    wanted = torch.stack([expected[place] for place in places])
    assert sorted(places) == sorted(expected)
    torch.testing.assert_close(logprobs, wanted, atol=2e-5, rtol=1e-4)
    assert (entropy >= 0).all()
    weight: Tensor = model.get_input_embeddings().weight
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    (exact,) = torch.autograd.grad(wanted.sum(), weight)
    torch.testing.assert_close(gradient, exact, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("option", ["s_aux", "softcap", "sliding_window"])
def test_what_packed_attention_does_not_do_is_refused(option: str) -> None:
    ((micro_batch,),) = builder(packed=True).build(make_batch(random_samples(1, [3], [2, 5], 2)))
    packed = micro_batch.inputs
    assert isinstance(packed, PackedInputs)
    heads = torch.randn(1, 2, 10, 8)
    options: dict[str, Any] = {"packed": packed, option: 1}

    with pytest.raises(ConfigError, match=f"passes {option} to its attention"):
        packed_attention(torch.nn.Identity(), heads, heads, heads, None, **options)


def test_advantages_and_lengths_follow_their_samples_into_packing_order() -> None:
    batch = make_batch(random_samples(2, [3, 4], [2, 5, 1, 5], 2))

    ((micro_batch,),) = builder(packed=True).build(batch)

    owners = (
        np.searchsorted(batch.offsets, micro_batch.columns[ROLLOUT_LOGPROBS].numpy(), side="right")
        - 1
    )
    assert listed(micro_batch.columns[ADVANTAGES]) == owners.astype(float).tolist()
    in_order = list(dict.fromkeys(owners.tolist()))
    assert listed(micro_batch.sample_lens) == [[2, 5, 1, 5][owner] for owner in in_order]
    assert float(micro_batch.weights.sum()) == pytest.approx(1.0)


def test_samples_without_an_advantage_are_left_out_if_the_loss_allows_it() -> None:
    batch = make_batch([([5], [6, 7]), ([5], [8, 9])])  # the advantage of the first is 0
    every = builder(packed=False)

    ((whole,),) = every.build(batch)
    ((kept,),) = replace(every, skips_neutral=True).build(batch)

    assert sorted(listed(whole.targets)) == [6, 7, 8, 9]
    assert listed(kept.targets) == [8, 9]


def test_a_sample_is_of_a_version_if_that_generated_all_its_tokens() -> None:
    batch = make_batch([([2, 3], [4, 5]), ([2, 3], [6, 7]), ([2], [8])])
    batch.versions[:] = [0, 0, 4, 4, 0, 0, 3, 4, 0, 5]  # meaningless for prompts

    assert batch.generated_by(4).tolist() == [True] * 4 + [False] * 6
    assert batch.generated_by(5).tolist() == [False] * 8 + [True] * 2


def test_a_groups_prompt_is_packed_once() -> None:
    samples = [
        Sample(tokens=tokens, prompt_len=6, generated=np.arange(6, len(tokens)))
        for tokens in (np.r_[np.arange(6), np.full(n, 9)].astype(np.int32) for n in (4, 3, 5))
    ]

    packed = pack([samples[idx] for idx in packing_order(samples)], torch.float32, CPU)

    assert packed.token_ids.shape == (1, 6 + 4 + 3 + 2)
    assert listed(packed.position_ids[0, :10]) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_block_has_completions_of_similar_length_and_a_mask_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "_MAX_MASK_ELEMENTS", 2 * 8 * 10)  # two completions, 8 by 2 + 8
    samples = [
        Sample(tokens=np.zeros(n + 3, np.int32), prompt_len=2, generated=np.arange(2, n + 3))
        for n in (8, 8, 8, 6, 5, 5)
    ]

    blocks = pack(samples, torch.float32, CPU).blocks

    assert [block.shape for block in blocks] == [(1, 2, 2), (2, 8, 10), (2, 8, 10), (2, 5, 7)]


def test_tokens_of_tools_are_fed_but_not_trained_on() -> None:
    batch = make_batch([([5, 6], [7, 8, 9, 10])])
    batch.mask[3:5] = 0  # tokens 8 and 9 came from a tool
    model = make_model()

    ((micro_batch,),) = builder(packed=False).build(batch)

    logprobs, _ = _Scorer(model, PASSES)(micro_batch.inputs, micro_batch.targets, "none")
    expected = reference_logprobs(model, batch)
    assert listed(micro_batch.targets) == [7, 10]
    torch.testing.assert_close(logprobs, torch.stack([expected[2], expected[5]]))


@pytest.mark.parametrize("packed", [True, False])
def test_an_empty_micro_batch_is_padding_without_weight(packed: bool) -> None:
    batch = make_batch([([5], [6])])
    empty: NDArray[np.uint8] = np.zeros(2, np.uint8)
    batch.mask[:] = empty

    ((micro_batch,),) = builder(packed).build(batch)

    assert listed(micro_batch.weights) == [0.0, 0.0]
    assert micro_batch.targets.shape == (2,)


def test_temperature_divides_the_logits() -> None:
    batch = make_batch([([5, 6], [7, 8])])
    model = make_model()
    ((micro_batch,),) = builder(packed=False).build(batch)

    logprobs, _ = _Scorer(model, replace(PASSES, temperature=0.5))(
        micro_batch.inputs, micro_batch.targets, "none"
    )

    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, 1:]
    expected = (logits / 0.5).log_softmax(-1)[[0, 1], [7, 8]]
    torch.testing.assert_close(logprobs, expected)
