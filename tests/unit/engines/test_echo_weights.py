"""The echo engine with `weights_in_logprobs`: its logprobs prove which weights it holds."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Collector, collect, on_the_engines_loop, running, wire_request
from local_sync import publish
from torch import Tensor

from umbra.engines.echo.echo_engine import (
    Drawn,
    EchoEngine,
    EchoTokens,
    echo_logprobs,
    weights_fingerprint,
)
from umbra.runtime.errors import ConfigError

VOCAB_SIZE = 97
LENGTH = 40


def weights(seed: int) -> dict[str, Tensor]:
    """More than a bucket, one tensor across buckets, one with padding behind it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (100, 101), "b": (7,), "c": (50, 50)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def drawn(seed: int) -> Drawn:
    return EchoTokens(seed, [1], vocab_size=VOCAB_SIZE).draw(LENGTH)


def expected_logprobs(tensors: dict[str, Tensor], seed: int) -> list[float]:
    fingerprint = weights_fingerprint([tensor.numpy().tobytes() for tensor in tensors.values()])
    return echo_logprobs(drawn(seed).keys, fingerprint).tolist()


def make_engine(**settings: Any) -> EchoEngine:
    return EchoEngine(vocab_size=VOCAB_SIZE, weights_in_logprobs=True, **settings)


async def completion_of(engine: EchoEngine, request_id: int) -> tuple[list[int], list[float]]:
    collector = Collector()
    await engine.submit([wire_request(request_id, [1], max_new_tokens=LENGTH)])
    await collect(engine, collector, 1)
    return collector[request_id].tokens, collector[request_id].logprobs


@on_the_engines_loop
async def test_logprobs_follow_the_weights_and_tokens_do_not(tmp_path: Path) -> None:
    engine = make_engine()
    async with running(engine):
        await publish(engine, weights(1), 4, tmp_path)
        tokens, first = await completion_of(engine, 5)
        await engine.pause("abort")
        await publish(engine, weights(2), 6, tmp_path)
        same_tokens, second = await completion_of(engine, 5)

    assert tokens == same_tokens == drawn(1005).tokens.tolist()
    assert first == expected_logprobs(weights(1), 1005)
    assert second == expected_logprobs(weights(2), 1005)
    assert not set(first) & set(second)
    assert max(first + second) < 0


@on_the_engines_loop
async def test_a_single_wrong_byte_shows_in_every_logprob(tmp_path: Path) -> None:
    engine = make_engine()
    changed = weights(1)
    changed["b"][6] += 1.0
    async with running(engine):
        await publish(engine, changed, 4, tmp_path)
        _, logprobs = await completion_of(engine, 5)

    assert logprobs == expected_logprobs(changed, 1005)
    assert not set(logprobs) & set(expected_logprobs(weights(1), 1005))


@on_the_engines_loop
async def test_weights_that_sleep_drops_are_gone(tmp_path: Path) -> None:
    engine = make_engine()
    async with running(engine):
        await publish(engine, weights(1), 4, tmp_path)
        await engine.pause("abort")
        await engine.sleep(1)
        kept = engine.weights_fingerprint()
        await engine.wake(["weights", "kv_cache"])
        await engine.sleep(2)

    assert kept != engine.weights_fingerprint() == weights_fingerprint([])


@on_the_engines_loop
async def test_without_the_option_logprobs_are_zero_and_nothing_is_kept(tmp_path: Path) -> None:
    engine = EchoEngine(vocab_size=VOCAB_SIZE)
    async with running(engine):
        await publish(engine, weights(1), 4, tmp_path)
        _, logprobs = await completion_of(engine, 5)

    assert set(logprobs) == {0.0}
    assert engine.weights_fingerprint() == weights_fingerprint([])


@pytest.mark.parametrize("wrong", [{"vocab_size": 0}, {"max_num_seqs": 0}, {"tokens_per_s": 0.0}])
def test_an_engine_that_could_make_no_token_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be (above 0|at least 1)"):
        EchoEngine(**wrong)
