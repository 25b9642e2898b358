"""Interrupted trajectories equal uninterrupted ones, under kills, moves, aborts and new versions.

float64: token for token and logprob for logprob, exactly, as delivered (logprobs as float32).
float32: every difference is a near-tie, proven from a float64 forward pass written apart.
"""

# pyright: reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pytest
import torch
from exact_runs import (
    Completion,
    Interruptions,
    Work,
    run_in_peace,
    run_interrupted,
)
from float64_forward import Float64Model
from near_ties import Float64Array, chosen_tokens, logprobs_of, shortfall
from safetensors.torch import load_file, save_file

from umbra.engines.embedded.sampler import uniforms
from umbra.runtime.session.session import Session

pytestmark = [pytest.mark.process, pytest.mark.slow]

TEMPERATURES: Final = {"greedy": 0.0, "sampled": 1.0}
WAYS: Final = pytest.mark.parametrize("way", TEMPERATURES)


@WAYS
def test_in_float64_nothing_differs(
    umbra_session: Session, tmp_path: Path, umbra_tiny_model_dir: Path, way: str
) -> None:
    work = Work(dtype="float64", temperature=TEMPERATURES[way])

    wanted = asyncio.run(run_in_peace(umbra_tiny_model_dir, work))
    found, happened = run_interrupted(umbra_session, tmp_path, umbra_tiny_model_dir, work)

    print(len(found), "trajectories:", happened)
    assert found.keys() == wanted.keys()
    assert len(found) == work.num_samples
    differing = [name for name in wanted if found[name].tokens != wanted[name].tokens]
    assert differing == []
    inexact = [name for name in wanted if found[name].logprobs != wanted[name].logprobs]
    assert inexact == []
    assert_interrupted(happened, work)


@WAYS
def test_in_float32_every_difference_is_a_near_tie(
    umbra_session: Session, tmp_path: Path, twins_dir: Path, way: str
) -> None:
    work = Work(dtype="float32", temperature=TEMPERATURES[way])

    wanted = asyncio.run(run_in_peace(twins_dir, work))
    found, happened = run_interrupted(umbra_session, tmp_path, twins_dir, work)

    print(len(found), "trajectories:", happened)
    assert found.keys() == wanted.keys()
    truth = Truth(Float64Model(twins_dir), work)
    peaceful, interrupted = truth.judge(wanted), truth.judge(found)
    differing = [name for name in wanted if found[name].tokens != wanted[name].tokens]
    for name in differing:
        # Up to the first difference the contexts are the same: one of the two is a near-tie.
        at = first_difference(wanted[name].tokens, found[name].tokens)
        assert (name, at) in peaceful.near_ties | interrupted.near_ties
    print(f"{len(differing)} differ; uninterrupted {peaceful}; interrupted {interrupted}")
    if way == "greedy":
        assert peaceful.near_ties | interrupted.near_ties, "the model has twins"
    assert_interrupted(happened, work)


def assert_interrupted(happened: Interruptions, work: Work) -> None:
    """The run was as rough as it was meant to be."""
    assert happened.syncs == work.num_steps + 1
    assert happened.segments >= work.num_samples + happened.cut_trajectories
    assert happened.cuts >= work.num_samples // 4
    assert happened.cut_trajectories >= work.num_samples // 10
    assert happened.counters["aborts"] >= work.num_samples // 10
    assert happened.kills >= 2
    assert happened.engine_aborts >= 1
    assert happened.counters["engines_lost"] >= happened.kills + 2, "streams that broke"


def first_difference(one: list[int], other: list[int]) -> int:
    """Runs of one length may differ; one may also stop where the other continues."""
    shared = zip(one, other, strict=False)
    return next(idx for idx, (left, right) in enumerate(shared) if left != right)


@pytest.fixture(scope="module")
def twins_dir(umbra_tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with every second token all but equal to the one before: many near-ties."""
    folder = tmp_path_factory.mktemp("models") / "twins"
    shutil.copytree(umbra_tiny_model_dir, folder)
    path = folder / "model.safetensors"
    tensors = load_file(str(path))
    embedding = tensors["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(embedding[4::2].shape, generator=generator) * 3e-7
    embedding[4::2] = embedding[3:-1:2][: len(noise)] * (1 + noise)
    save_file(tensors, str(path), {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return folder


class Judgement(NamedTuple):
    """Logprobs of a run's tokens, from the float64 forward pass over their own contexts.

    Attributes:
        near_ties: (sample id, position) of the tokens that float64 would not have chosen.
        num_tokens: that were looked at.
        largest_shortfall: of the near-ties, as a share of what the bound allows.
        largest_error: of logprobs, as a share of what the bound allows.
    """

    near_ties: set[tuple[str, int]]
    num_tokens: int
    largest_shortfall: float
    largest_error: float

    def __str__(self) -> str:
        return (
            f"{len(self.near_ties)} near-ties of {self.num_tokens} tokens, at most "
            f"{self.largest_shortfall:.2g} of the bound; logprobs at most "
            f"{self.largest_error:.2g} of it"
        )


class Truth:
    """Asserts that a token which float64 would not have chosen is a near-tie."""

    def __init__(self, model: Float64Model, work: Work) -> None:
        self._model = model
        self._work = work

    def judge(self, completions: dict[str, Completion]) -> Judgement:
        near_ties: set[tuple[str, int]] = set()
        shares, errors, num_tokens = [0.0], [0.0], 0
        for name, completion, logits, bounds in self._forced(completions):
            tokens = np.array(completion.tokens)
            found = np.abs(logprobs_of(logits, tokens) - completion.logprobs) / bounds
            assert found.max() <= 1, (name, int(found.argmax()), found.max())
            errors.append(float(found.max()))
            num_tokens += len(tokens)
            draws = self._draws(name, len(tokens))
            for at in np.flatnonzero(chosen_tokens(logits, draws) != tokens).tolist():
                draw = None if draws is None else float(draws[at])
                share = shortfall(logits[at], draw, int(tokens[at])) / float(bounds[at])
                assert share <= 1, (name, at, share)
                near_ties.add((name, at))
                shares.append(share)
        return Judgement(near_ties, num_tokens, max(shares), max(errors))

    def _draws(self, name: str, num_tokens: int) -> Float64Array | None:
        if self._work.temperature == 0:
            return None
        seed = self._work.seeds[name][1]
        return uniforms(np.full(num_tokens, seed, np.uint64), np.arange(num_tokens))

    def _forced(
        self, completions: dict[str, Completion]
    ) -> Iterator[tuple[str, Completion, Float64Array, Float64Array]]:
        """Each completion with the logits [C, V] before its tokens, and the bounds [C] (2 e)."""
        names = sorted(completions)
        for start in range(0, len(names), 100):
            part = names[start : start + 100]
            prompts = [self._work.prompts[self._work.seeds[name][0]].tolist() for name in part]
            rows = [
                torch.tensor(prompt + completions[name].tokens)
                for prompt, name in zip(prompts, part, strict=True)
            ]
            tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            with torch.inference_mode():
                logits, bounds = self._model.logits(tokens)
            for row, (prompt, name) in enumerate(zip(prompts, part, strict=True)):
                completion = completions[name]
                own = slice(len(prompt) - 1, len(prompt) - 1 + len(completion.tokens))
                yield name, completion, logits[row, own].numpy(), 2 * bounds[row, own].numpy()
