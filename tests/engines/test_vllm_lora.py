"""vLLM on the CPU with LoRA adapters, beside transformers with their matrices merged in."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_factory import merged_model, save_adapter
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_suite import VOCAB_SIZE, MakeEngine, results_of
from engine_runs import Collector, Completion, collect, run_async, running, wire_request
from local_sync import publish
from model_factory import make_model
from vllm_runs import needs_vllm, running_core

from umbra.engines.vllm.core import VllmCore
from umbra.runtime.errors import EngineError

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
MAX_NUM_SEQS = 16
NAMES = ("", "all", "some")  # "": the model as it is
NUM_TOKENS = 12


@pytest.fixture(scope="session", params=["qwen3", "qwen3-untied"])
def model_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def max_num_seqs() -> int:
    return MAX_NUM_SEQS


@pytest.fixture(scope="session")
def adapters(model_kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    attention = ("q_proj", "o_proj")
    return {
        "all": save_adapter(folder / "all", model_kind, seed=1, rank=4),
        "some": save_adapter(folder / "some", model_kind, seed=2, rank=10, targets=attention),
    }


@pytest.fixture(scope="module")
def core(
    model_kind: str, model_folder: Callable[[str], Path], adapters: dict[str, Path]
) -> Generator[VllmCore]:
    paths = {name: str(path) for name, path in adapters.items()}
    with running_core(
        model_folder(model_kind), max_num_seqs=MAX_NUM_SEQS, lora_adapters=paths
    ) as core:
        yield core


def asked_of_each(num_prompts: int, **changes: Any) -> dict[str, list[dict[str, Any]]]:
    """The same prompts for every adapter, longer than a block of the prefix cache (128 tokens)."""
    prompts = np.random.default_rng(5).integers(0, VOCAB_SIZE, (num_prompts, 150)).tolist()
    fields: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.7} | changes
    return {
        name: [
            wire_request(100 * which + i, prompt, lora=name, **fields)
            for i, prompt in enumerate(prompts)
        ]
        for which, name in enumerate(NAMES)
    }


def all_of(asked: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [request for requests in asked.values() for request in requests]


def logprob_error(
    kind: str, seed: int, adapter: Path | None, request: dict[str, Any], found: Completion
) -> float:
    """The largest difference to the model with the adapter merged in, over the new tokens."""
    prompt = request["tokens"].tolist()
    with torch.inference_mode():
        model = merged_model(kind, seed, adapter)
        logits = model(torch.tensor([prompt + found.tokens])).logits[0]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1] / request["temperature"], -1)
    chosen = expected.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    return float((torch.tensor(found.logprobs) - chosen).abs().max())


async def check_each(engine: Any, kind: str, seed: int, adapters: dict[str, Path]) -> None:
    """Twice, the second time with cached prefixes; each adapter's logprobs are its own."""
    for _ in range(2):
        asked = asked_of_each(2)
        results = await results_of(engine, all_of(asked))
        for name in NAMES:
            for request in asked[name]:
                found = results[request["id"]]
                assert len(found.tokens) == NUM_TOKENS
                assert logprob_error(kind, seed, adapters.get(name), request, found) < 1e-4
                other = adapters["some" if name != "some" else "all"]
                assert logprob_error(kind, seed, other, request, found) > 0.1


def test_requests_of_several_adapters_get_the_logprobs_of_their_own(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path]
) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            await check_each(engine, model_kind, 0, adapters)

    run_async(body)


@pytest.mark.parametrize("sleep_level", [None, 1, 2])
def test_an_update_gives_new_weights_beneath_the_same_adapters(
    make_engine: MakeEngine,
    model_kind: str,
    adapters: dict[str, Path],
    tmp_path: Path,
    sleep_level: Any,
) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            await check_each(engine, model_kind, 0, adapters)
            for version in (1, 2):
                await engine.pause("abort")
                if sleep_level is not None:
                    await engine.sleep(sleep_level)
                    await engine.wake(["weights", "kv_cache"])
                weights = dict(make_model(model_kind, version).named_parameters())
                await publish(engine, weights, version, tmp_path)
                await check_each(engine, model_kind, version, adapters)

    run_async(body)


def test_a_frozen_request_goes_on_with_its_adapter_over_the_new_weights(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    asked = asked_of_each(1, max_new_tokens=300)

    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            await engine.submit(all_of(asked))
            await engine.pause("keep")
            weights = dict(make_model(model_kind, 1).named_parameters())
            await publish(engine, weights, 1, tmp_path)
            collector = Collector()
            await collect(engine, collector, len(NAMES))

            assert all(found.reason == "length" for found in collector.completions.values())
            assert all(1 in found.versions for found in collector.completions.values())
            await check_each(engine, model_kind, 1, adapters)

    run_async(body)


def test_an_unknown_adapter_is_refused(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            with pytest.raises(ValueError, match="no LoRA adapter 'other' here; known: all, some"):
                await engine.submit([wire_request(0, [1], lora="other")])

    run_async(body)


def test_an_update_fails_where_an_adapter_has_gone(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    async def body() -> None:
        engine = make_engine()
        weights = dict(make_model(model_kind, 1).named_parameters())
        async with running(engine):
            away = adapters["all"].rename(tmp_path / "away")
            try:
                await engine.pause("abort")
                with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="LoRA adapter 'all'")):
                    await publish(engine, weights, 1, tmp_path)
            finally:
                away.rename(adapters["all"])
            await publish(engine, weights, 2, tmp_path)
            await check_each(engine, model_kind, 1, adapters)

    run_async(body)
