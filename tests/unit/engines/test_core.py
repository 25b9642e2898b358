"""Batches, interruptions, a short cache and versions: none of them changes a trajectory."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import (
    Collector,
    forced_logprobs,
    load_model,
    make_core,
    make_request,
    run_to_end,
    take,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_core import NOT_FINITE, EngineCore
from umbra.runtime.engine_api.generation_request import GenerationRequest

VOCAB_SIZE = 97


@pytest.fixture(scope="module")
def model(model_folder: Callable[[str], Path]) -> DecoderModel:
    return load_model(model_folder("qwen3"), "float64")


@pytest.fixture
def core(model: DecoderModel) -> EngineCore:
    return make_core(model)


def mixed_requests(count: int, seed: int = 0, **changes: Any) -> list[GenerationRequest]:
    """Groups of up to three share a prompt; greedy and sampled, some from the most probable tokens
    only; some with stop tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB_SIZE, rng.integers(1, 60)).tolist() for _ in range(count)]
    return [
        make_request(
            i,
            prompts[i - i % int(rng.integers(1, 4))],
            seed=int(rng.integers(1 << 62)),
            position=int(rng.integers(0, 5)),
            max_new_tokens=int(rng.integers(1, 100)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            stop_token_ids=rng.integers(0, VOCAB_SIZE, rng.integers(0, 3)).tolist(),
            top_p=float(rng.choice([1.0, 1.0, 0.8])),
            top_k=int(rng.choice([0, 0, 7])),
            **changes,
        )
        for i in range(count)
    ]


def assert_same(found: Collector, expected: Collector) -> None:
    assert found.completions.keys() == expected.completions.keys()
    for request_id, completion in expected.completions.items():
        assert found[request_id].tokens == completion.tokens, request_id
        assert found[request_id].logprobs == pytest.approx(completion.logprobs, abs=1e-6)
        assert found[request_id].reason == completion.reason


@pytest.fixture(scope="module")
def alone(model: DecoderModel) -> Collector:
    """The mixed requests, each generated with nothing beside it."""
    results = Collector()
    for request in mixed_requests(24):
        results.completions |= run_to_end(make_core(model), [request]).completions
    return results


def test_logprobs_are_those_of_the_tokens_that_are_kept(model: DecoderModel) -> None:
    shared = {"max_new_tokens": 30, "temperature": 0.8}
    ways: list[dict[str, Any]] = [
        {},
        {"top_p": 0.5},
        {"top_k": 4},
        {"top_p": 0.5, "top_k": 4},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"top_p": 0.5, "top_k": 4, "temperature": 0.0},
        {"temperature": 0.0},
    ]
    asked = [make_request(idx, [5, 9, 33], **(shared | way)) for idx, way in enumerate(ways)]

    results = run_to_end(make_core(model), asked)

    for request in asked[:4]:
        completion = results[request.id]
        sequence = [5, 9, 33, *completion.tokens]
        every = forced_logprobs(model, [sequence], 3)[0, :-1].double() / 0.8
        for shares, token, logprob in zip(
            every.softmax(-1), completion.tokens, completion.logprobs, strict=True
        ):
            kept = shares.sort(descending=True).values[: request.top_k or None]
            kept = kept / kept.sum()
            kept = kept[kept.cumsum(0) - kept < request.top_p]
            assert token in shares.argsort(descending=True)[: len(kept)]
            best = shares.sort(descending=True).values[: len(kept)].sum()
            assert logprob == pytest.approx(float((shares[token] / best).log()), abs=1e-6)
    assert results[4].tokens == results[5].tokens == results[7].tokens
    assert set(results[4].logprobs) == set(results[5].logprobs) == {0.0}
    assert results[6].logprobs == results[7].logprobs != results[5].logprobs


@pytest.mark.slow
def test_a_short_cache_preempts_and_recomputes_exactly(
    model: DecoderModel, alone: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(model, kv_cache_num_tokens=512)
    evictions: list[int] = []
    evict = EngineCore._evict  # pyright: ignore[reportPrivateUsage]

    def watched(core: EngineCore, evicted: Sequence[int]) -> None:
        evictions.extend(evicted)
        evict(core, evicted)

    monkeypatch.setattr(EngineCore, "_evict", watched)

    results = run_to_end(core, mixed_requests(24))

    assert_same(results, alone)
    assert evictions, "the cache was not short"


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_interrupted_at_random_and_resubmitted_goes_on_token_for_token(
    model: DecoderModel, alone: Collector, data: st.DataObject
) -> None:
    requests = mixed_requests(24)
    results, seed = Collector(), data.draw(st.integers(0, 1 << 16))
    rng = np.random.default_rng(seed)
    pending: list[GenerationRequest] = list(requests)
    while pending:
        core = make_core(model, kv_cache_num_tokens=int(rng.choice([512, 1024, 4096])))
        bystanders = [
            make_request(1000 + i, rng.integers(0, VOCAB_SIZE, 9).tolist(), max_new_tokens=50)
            for i in range(int(rng.integers(0, 6)))
        ]
        batch = [*pending, *bystanders]
        core.add([batch[int(i)] for i in rng.permutation(len(batch))])
        part = Collector()
        for _ in range(int(rng.integers(1, 40))):
            core.step()
            if rng.random() < 0.3:
                take(core, part)
        core.abort(None if rng.random() < 0.5 else [request.id for request in batch])
        take(core, part)
        pending = [rest for request in pending if (rest := merge(request, part, results))]

    assert_same(results, alone)


def merge(
    request: GenerationRequest, part: Collector, results: Collector
) -> GenerationRequest | None:
    """Appends what an interrupted core made of a request; what is left to do of it."""
    made, whole = part[request.id], results[request.id]
    if made.next_position is not None:
        assert made.next_position == request.position + len(made.tokens)
    whole.tokens += made.tokens
    whole.logprobs += made.logprobs
    if made.reason != "abort":
        whole.reason = made.reason
        return None
    return request.resumed(np.append(request.tokens, np.array(made.tokens, np.int32)))


def test_a_run_never_mixes_versions(core: EngineCore) -> None:
    core.set_version(4)
    core.add([make_request(i, [1, 2], max_new_tokens=12) for i in range(3)])
    results = Collector()
    core.step()
    core.set_version(5)
    core.step()
    core.set_version(6)
    while core.has_work:
        core.step()

    take(core, results)

    for completion in results.completions.values():
        assert completion.versions == [4, 4, 5] + [6] * 9


def test_requests_beyond_the_limit_wait_their_turn(model: DecoderModel) -> None:
    core = make_core(model, max_num_seqs=4)
    core.add([make_request(i, [1, 2], max_new_tokens=6) for i in range(10)])

    core.step()

    assert (core.num_running, core.num_waiting) == (4, 6)
    results = run_to_end(core)
    assert all(len(c.tokens) == 6 for c in results.completions.values())
    assert list(results.completions) == list(range(10)), "first come, first served"


def test_kv_tokens_are_counted_while_they_are_held(core: EngineCore) -> None:
    core.add([make_request(i, [1] * 10, max_new_tokens=3) for i in range(2)])

    core.step()

    assert core.kv_tokens_used == 2 * 12
    run_to_end(core)
    assert core.kv_tokens_used == 0
    assert core.num_tokens_total == 6


def test_broken_weights_end_a_request_with_an_error_and_no_bad_token(
    model_folder: Callable[[str], Path],
) -> None:
    model = load_model(model_folder("qwen3"))
    core = make_core(model)
    healthy = run_to_end(core, [make_request(0, [1, 2], max_new_tokens=30)])[0]
    embedding = model.parameters.destinations["model.embed_tokens.weight"]
    saved = embedding.clone()
    core.add([make_request(1, [1, 2], max_new_tokens=30)])
    core.step()

    with torch.inference_mode():
        embedding.fill_(float("nan"))
    broken = run_to_end(core)[1]

    assert broken.reason == NOT_FINITE
    assert np.isfinite(broken.logprobs).all()
    with torch.inference_mode():
        embedding.copy_(saved)
    again = run_to_end(
        core, [make_request(i, [1, 2], seed=1000, max_new_tokens=30) for i in (0, 9)]
    )
    assert again[0].tokens == again[9].tokens == healthy.tokens, "the cache kept no NaN"


def test_frozen_requests_survive_the_loss_of_the_cache(
    model: DecoderModel, alone: Collector
) -> None:
    core, results = make_core(model, max_num_seqs=32), Collector()
    core.add(mixed_requests(24))
    for _ in range(7):
        core.step()

    core.preempt_all()
    core.cache.release()
    core.cache.restore()

    take(core, results)
    while core.has_work:
        core.step()
        take(core, results)
    assert_same(results, alone)
