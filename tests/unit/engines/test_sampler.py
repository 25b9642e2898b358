"""Inverse-CDF sampling: the right frequencies, the right logprobs, never an impossible token."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from umbra.engines.embedded import sampler
from umbra.engines.embedded.sampler import sample, uniforms


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
