"""Tests the helpers with which `test_exact_tokens` compares tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from float64_forward import Float64Model
from near_ties import chosen_tokens, logprobs_of, shortfall

from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_worker import load_checkpoint
from umbra.engines.embedded.kv_cache import KvCache
from umbra.engines.embedded.sampler import sample
from umbra.runtime.engine_api.decoder_config import load_model_config

WAYS = pytest.mark.parametrize("way", ["greedy", "sampled"])


@WAYS
def test_tokens_and_logprobs_are_those_of_the_engine(way: str) -> None:
    rng = np.random.default_rng(0)
    logits, draws = rng.normal(0, 3, (500, 40)), rng.random(500)

    tokens, logprobs = sample(
        torch.tensor(logits),
        temperatures=None,
        is_greedy=torch.full((500,), way == "greedy"),
        uniforms=torch.tensor(draws)[:, None],
    )

    assert (chosen_tokens(logits, None if way == "greedy" else draws) == tokens.numpy()).all()
    assert logprobs_of(logits, tokens.numpy()) == pytest.approx(logprobs.numpy(), abs=1e-12)


@WAYS
def test_an_error_in_the_logits_moves_a_choice_by_no_more_than_twice_as_much(way: str) -> None:
    rng = np.random.default_rng(1)
    error = 0.05
    logits, draws = rng.normal(0, 1, (4000, 12)), rng.random(4000)
    known = None if way == "greedy" else draws
    moved = chosen_tokens(logits + rng.uniform(-error, error, logits.shape), known)

    differing = np.flatnonzero(chosen_tokens(logits, known) != moved)

    shortfalls = [
        shortfall(logits[at], None if known is None else known[at], int(moved[at]))
        for at in differing
    ]
    assert len(shortfalls) > 50
    assert 0.2 * error < max(shortfalls) <= 2 * error


@WAYS
def test_another_token_is_no_near_tie(way: str) -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3]))
    draw = None if way == "greedy" else 0.4

    shortfalls = [shortfall(logits, draw, token) for token in range(3)]

    assert shortfalls[1] == 0
    assert min(shortfalls[0], shortfalls[2]) > 0.5


def test_float32_logits_are_as_near_as_the_estimate_says(umbra_tiny_model_dir: Path) -> None:
    """All of them, after a prefill and in decoding; and the estimate is not a loose one."""
    model = DecoderModel(
        load_model_config(str(umbra_tiny_model_dir)),
        max_context_len=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    load_checkpoint(str(umbra_tiny_model_dir), model.parameters)
    tokens = torch.tensor(np.random.default_rng(2).integers(3, 97, (32, 48)))
    cache = KvCache(
        model.config, num_tokens=32 * 64, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.set_capacity(64, num_rows=0, num_tokens=0)

    def places(at: int) -> torch.Tensor:
        return torch.full((32,), at)

    with torch.inference_mode():
        wanted, bounds = Float64Model(umbra_tiny_model_dir).logits(tokens)
        steps = [model.prefill(tokens[:, :8], places(7), cache, first_row=0, copies=None)]
        for at in range(8, 48):
            steps.append(model.decode(tokens[:, at], places(at), cache, span=at + 1))
        errors = (torch.stack(steps, 1).double() - wanted[:, 7:]).abs().amax(-1)

    shares = errors / bounds[:, 7:]
    assert 0.1 < float(shares.max()) < 1
    assert float(bounds.max()) < 3e-5
