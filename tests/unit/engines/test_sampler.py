"""Drawing tokens: uniform numbers, the kept part of a distribution, versions of weights."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from umbra.engines.embedded import sampler
from umbra.engines.embedded.sampler import sample, uniforms
from umbra.runtime.engine_api import kept_tokens
from umbra.runtime.engine_api.kept_tokens import Truncation, lowest_kept
from umbra.runtime.engine_api.lifecycle import EngineGate
from umbra.runtime.errors import IllegalTransition


def draws(num_seqs: int, seed: int = 0) -> Tensor:
    seeds = np.full(num_seqs, seed, np.uint64)
    return torch.from_numpy(uniforms(seeds, np.arange(num_seqs)))[:, None]


def test_frequencies_follow_the_tempered_distribution() -> None:
    num_seqs, temperature = 40_000, 0.7
    logits = torch.tensor([0.3, -1.0, 1.5, 0.0, -0.2]).expand(num_seqs, -1)
    temperatures = torch.full((num_seqs, 1), temperature)

    tokens, _ = sample(logits, temperatures=temperatures, is_greedy=None, uniforms=draws(num_seqs))

    expected = torch.softmax(logits[0] / temperature, -1) * num_seqs
    chi_squared = ((torch.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum()
    assert chi_squared < 4 + 5 * (2 * 4) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logprobs_are_those_of_the_chosen_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(64, 300, dtype=torch.float64) * 5).to(dtype)
    temperatures = torch.rand(64, 1, dtype=torch.float64) + 0.5
    is_greedy = torch.arange(64) % 3 == 0
    temperatures[is_greedy] = 1.0

    tokens, logprobs = sample(
        logits, temperatures=temperatures, is_greedy=is_greedy, uniforms=draws(64)
    )

    expected = torch.log_softmax(logits.double() / temperatures, -1)
    expected = expected.gather(1, tokens[:, None])[:, 0]
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=tolerance * 10)
    assert torch.equal(tokens[is_greedy], logits[is_greedy].argmax(-1))


def test_extreme_draws_stay_within_the_possible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    extremes = torch.tensor([[2.0**-53], [1 - 2.0**-53]], dtype=torch.float64)

    tokens, logprobs = sample(logits, temperatures=None, is_greedy=None, uniforms=extremes)

    assert tokens.tolist() == [1, 3]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.5])


def test_a_batch_cut_into_chunks_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, is_greedy = torch.randn(10, 50), torch.arange(10) % 2 == 0
    temperatures = torch.rand(10, 1) + 0.5
    settings = {"temperatures": temperatures, "is_greedy": is_greedy, "uniforms": draws(10)}
    whole = sample(logits, **settings)

    monkeypatch.setattr(sampler, "_MAX_CHUNK_ELEMENTS", 150)
    cut = sample(logits, **settings)

    assert torch.equal(cut[0], whole[0])
    assert torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_logprob(poison: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 2] = poison

    tokens, logprobs = sample(logits, temperatures=None, is_greedy=None, uniforms=draws(3))

    assert logprobs.isfinite().tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < 8)).all()


def draw(seeds: list[int], positions: list[int]) -> list[float]:
    return uniforms(np.array(seeds, np.uint64), np.array(positions, np.int64)).tolist()


def test_a_draw_is_the_same_whatever_the_batch() -> None:
    together = draw([1, 2, 3, (1 << 63) - 1], [0, 5, 7, 1 << 30])

    alone = [draw([1], [0]), draw([2], [5]), draw([3], [7]), draw([(1 << 63) - 1], [1 << 30])]

    assert together == [one for (one,) in alone]


def test_draws_are_stable_across_releases() -> None:
    assert draw([0, 1, 12345], [0, 0, 678]) == [
        0.6524484863740322,
        0.3681895156516696,
        0.8468128010864125,
    ]


def test_draws_are_uniform_and_independent_along_both_axes() -> None:
    seeds, positions = np.meshgrid(np.arange(400, dtype=np.uint64), np.arange(400))

    grid = uniforms(seeds, positions)

    assert grid.min() > 0
    assert grid.max() < 1
    histogram = np.histogram(grid, bins=64, range=(0, 1))[0]
    expected = grid.size / 64
    chi_squared = float(((histogram - expected) ** 2 / expected).sum())
    assert chi_squared < 63 + 5 * (2 * 63) ** 0.5
    for axis in (0, 1):
        first, second = (np.delete(grid, drop, axis=axis).ravel() for drop in (-1, 0))
        correlation = np.corrcoef(first, second)[0, 1]
        assert abs(correlation) < 5 / grid.size**0.5


LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]]).log()
HEAT = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("top_p", "top_k", "share"),
    [
        (0.48, 0, 0.5),
        (0.52, 0, 0.25),
        (0.73, 0, 0.25),
        (0.77, 0, 0.125),
        (1.0, 1, 0.5),
        (1.0, 2, 0.25),
        (1.0, 9, 0.125),
        (0.6, 2, 0.5),  # of the two that top-k keeps, the first has two thirds
        (0.7, 2, 0.25),
        (1e-9, 0, 0.5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_least_probable_kept_token(
    top_p: float, top_k: int, share: float, dtype: torch.dtype
) -> None:
    logits = LOGITS.to(dtype)

    lowest = lowest_kept(logits, HEAT, Truncation(top_p, top_k))

    assert lowest.tolist() == [[logits[0][[0.5, 0.25, 0.125].index(share)].item()]] * 2


def test_a_higher_temperature_keeps_more() -> None:
    heats = torch.tensor([[0.5], [2.0]])

    lowest = lowest_kept(LOGITS, heats, Truncation(0.7))

    assert lowest.exp().flatten().tolist() == pytest.approx([0.5, 0.125])


def test_rows_are_sorted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, heats = torch.randn(9, 50), torch.rand(9, 1) + 0.5
    whole = lowest_kept(logits, heats, Truncation(0.8, 30))

    monkeypatch.setattr(kept_tokens, "MAX_SORTED_LOGITS", 120)

    assert torch.equal(lowest_kept(logits, heats, Truncation(0.8, 30)), whole)


def serving(version: int) -> EngineGate:
    gate = EngineGate()
    gate.start_serving(version)
    return gate


def test_memory_of_no_such_name_neither_sleeps_nor_wakes() -> None:
    tags: Any = ["weights", "cache"]
    for change in (lambda: serving(3).sleep(1, tags), lambda: serving(3).wake(tags)):
        with pytest.raises(ValueError, match=r"unknown tags \['cache'\]"):
            change()


def test_an_abort_without_an_update_leaves_the_version() -> None:
    gate = serving(3)

    gate.abort_update()

    assert (gate.is_serving, gate.version) == (True, 3)


def test_an_aborted_update_leaves_no_version() -> None:
    gate = serving(3)
    gate.begin_update(4, is_idle=True)

    gate.abort_update()

    assert gate.version is None
    with pytest.raises(IllegalTransition):
        gate.resume()
