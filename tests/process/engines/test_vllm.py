"""vLLM on the CPU: the conformance suite, and what only a real engine can be asked."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Coroutine, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_runs import VOCAB_SIZE, MakeEngine, requests, results_of
from conformance_suite import *  # noqa: F403 - the tests
from engine_runs import Collector, collect, on_the_engines_loop, running, wire_request
from local_sync import publish
from model_factory import make_model, save_model
from torch import Tensor
from transformers import PreTrainedModel
from vllm_runs import MAX_NUM_SEQS, needs_vllm, running_core

from umbra.engines.vllm.vllm_engine import VllmCore, VllmEngine
from umbra.runtime.engine_api.kept_tokens import WHOLE, Truncation, lowest_kept
from umbra.runtime.errors import EngineError
from umbra.trainer.model.model_loading import fix_rotary_frequencies

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@pytest.fixture(scope="module", params=["vllm"])
def core(model_folder: Callable[[str], Path]) -> Generator[VllmCore]:
    with running_core(model_folder("qwen3")) as core:
        yield core


@pytest.fixture(scope="session")
def max_num_seqs() -> int:
    return MAX_NUM_SEQS


@pytest.fixture(scope="session")
def frees_memory_asleep() -> bool:
    return False


def greedy_of_transformers(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def float32_weights(seed: int) -> dict[str, Tensor]:
    return dict(make_model("qwen3", seed).named_parameters(remove_duplicate=True))


def long_prompts(count: int, num_tokens: int = 150) -> list[list[int]]:
    """Longer than a block of vLLM's prefix cache, which 128 tokens fill on the CPU."""
    return np.random.default_rng(1).integers(0, VOCAB_SIZE, (count, num_tokens)).tolist()


@pytest.mark.parametrize(
    ("temperature", "truncation"),
    [
        (0.0, WHOLE),
        (0.6, WHOLE),
        (1.0, WHOLE),
        (0.6, Truncation(top_p=0.5)),
        (1.0, Truncation(top_k=4)),
        (0.6, Truncation(top_p=0.5, top_k=4)),
        (1.0, Truncation(top_k=1)),
    ],
)
@on_the_engines_loop
async def test_logprobs_are_those_of_transformers(
    make_engine: MakeEngine, temperature: float, truncation: Truncation
) -> None:
    model = make_model("qwen3")

    engine = make_engine()
    async with running(engine):
        asked = requests(6, max_new_tokens=40, temperature=temperature, **truncation._asdict())
        results = await results_of(engine, asked)

    for request in asked:
        prompt, completion = request["tokens"].tolist(), results[request["id"]]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + completion.tokens])).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        heat = torch.full((len(logits), 1), temperature or 1.0)
        left_out = logits < lowest_kept(logits, heat, truncation)
        expected = torch.log_softmax(logits.masked_fill(left_out, -torch.inf) / heat, -1)
        chosen = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert torch.tensor(completion.logprobs).allclose(chosen, atol=1e-4)


@on_the_engines_loop
async def test_prompts_of_more_tokens_than_a_step_takes_are_served(make_engine: MakeEngine) -> None:
    """Requests like those resumed after a death: all at once, long, with seeds."""
    draw = random.Random(0)
    prompts = [draw.choices(range(VOCAB_SIZE), k=480) for _ in range(MAX_NUM_SEQS)]
    asked = [wire_request(i, p, max_new_tokens=4) for i, p in enumerate(prompts)]

    engine = make_engine()
    async with running(engine):
        results = await results_of(engine, asked)
    assert [len(results[i].tokens) for i in range(MAX_NUM_SEQS)] == [4] * MAX_NUM_SEQS


@on_the_engines_loop
async def test_an_update_changes_the_output_to_that_of_the_new_weights(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    prompts = long_prompts(3)
    asked = [wire_request(i, p, max_new_tokens=12, temperature=0.0) for i, p in enumerate(prompts)]

    engine = make_engine()
    async with running(engine):
        for version in range(4):  # version 0 is there from the start
            if version:
                await engine.pause("keep")
                await publish(engine, float32_weights(version), version, tmp_path)
            model = make_model("qwen3", version)
            for _ in range(2):  # the second time with cached prefixes
                results = await results_of(engine, asked)
                for i, prompt in enumerate(prompts):
                    assert results[i].tokens == greedy_of_transformers(model, prompt, 12)
                    assert set(results[i].versions) == {version}


@on_the_engines_loop
async def test_what_waits_when_weights_come_begins_under_them(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """It must not use its prompt's keys, which others have cached under the older weights."""
    (prompt,) = long_prompts(1)
    first = [wire_request(i, prompt, max_new_tokens=300) for i in range(MAX_NUM_SEQS)]
    last = MAX_NUM_SEQS
    asked = wire_request(last, prompt, max_new_tokens=12, temperature=0.0)

    engine, collector = make_engine(), Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        await engine.submit([*first, asked])
        while not all(collector[i].tokens for i in range(MAX_NUM_SEQS)):
            collector.apply(await anext(batches))
        await engine.pause("keep")
        await publish(engine, float32_weights(1), 1, tmp_path)
        while collector[last].reason is None:
            collector.apply(await anext(batches))
        assert (collector[last].reason, collector[last].tokens) == ("abort", [])

        await engine.abort(range(MAX_NUM_SEQS))
        await engine.submit([asked | {"id": last + 1}])
        while collector[last + 1].reason is None:
            collector.apply(await anext(batches))

    expected = greedy_of_transformers(make_model("qwen3", 1), prompt, 12)
    assert collector[last + 1].tokens == expected
    assert set(collector[last + 1].versions) == {1}


def with_unknown(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"model.layers.1.unknown.weight": torch.ones(3)}


def with_another_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


def with_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"model.layers.1.mlp.down_proj.bias": torch.ones(48)}


def without_k_proj(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return without(tensors, "model.layers.1.self_attn.k_proj.weight")


def without_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return without(tensors, "model.norm.weight")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_unknown, "layers.1.unknown"),
        (with_another_head, "ties lm_head.weight to model.embed_tokens.weight, and the trainer"),
        (with_bias, "lacks 1 of the trainer's weights: model.layers.1.mlp.down_proj.bias"),
        (without_k_proj, "self_attn.qkv_proj"),
        (without_norm, "model.norm.weight"),
    ],
)
@on_the_engines_loop
async def test_weights_that_do_not_fit_are_never_served_and_spoil_no_later_update(
    make_engine: MakeEngine,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    text: str,
) -> None:
    (prompt,) = long_prompts(1)
    asked = wire_request(0, prompt, max_new_tokens=12, temperature=0.0)

    engine = make_engine()
    async with running(engine):
        assert text in await failure_of(publish(engine, change(float32_weights(1)), 1, tmp_path))
        with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
            await engine.submit([asked])

        await publish(engine, float32_weights(2), 2, tmp_path)

        results = await results_of(engine, [asked])
    expected = greedy_of_transformers(make_model("qwen3", 2), prompt, 12)
    assert results[0].tokens == expected


async def failure_of(publishing: Coroutine[Any, Any, object]) -> str:
    """vLLM's error text; the error itself is dropped, because its frames hold the weights."""
    try:
        await publishing
    except ExceptionGroup as group:
        return str(group.exceptions[0])
    raise AssertionError("it was taken")


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


@on_the_engines_loop
async def test_all_of_vllm_sleeps_and_wakes_whatever_part_was_awake(
    make_engine: MakeEngine, core: VllmCore
) -> None:
    llm: Any = core._llm  # pyright: ignore[reportPrivateUsage]

    engine = make_engine()
    async with running(engine):
        await engine.pause("abort")
        for half in ("kv_cache", "weights"):
            await engine.sleep(1)
            await engine.wake([half])  # pyright: ignore[reportArgumentType]
            await engine.sleep(1)
            await engine.wake(["weights"])
            assert await llm.is_sleeping()
            await engine.wake(["kv_cache"])
            assert not await llm.is_sleeping()


@on_the_engines_loop
async def test_a_hundred_requests_at_once_end_as_they_would_alone(make_engine: MakeEngine) -> None:
    model = make_model("qwen3")

    engine = make_engine()
    async with running(engine):
        asked = requests(100, max_new_tokens=30, temperature=0.0)
        await engine.submit(asked)
        stats = await engine.stats()
        collector = Collector()
        await collect(engine, collector, 100)

    assert (stats["running"], stats["waiting"]) == (MAX_NUM_SEQS, 100 - MAX_NUM_SEQS)
    for request in asked[::9]:
        expected = greedy_of_transformers(model, request["tokens"].tolist(), 30)
        assert collector[request["id"]].tokens == expected


@on_the_engines_loop
async def test_requests_aborted_one_by_one_lose_nothing_but_their_ends(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    async with running(engine):
        asked = requests(16, max_new_tokens=300, temperature=0.0)
        whole = await results_of(engine, asked)
        collector = Collector()
        async with aclosing(engine.deltas()) as batches:
            await engine.submit(asked)
            while collector.num_finished() < len(asked):
                collector.apply(await anext(batches))
                for i, completion in list(collector.completions.items()):
                    if completion.reason is None and len(completion.tokens) > 5 * i:
                        await engine.abort([i])

    for i in range(len(asked)):
        tokens = collector[i].tokens
        assert tokens
        assert tokens == whole[i].tokens[: len(tokens)]


@pytest.mark.umbra_allow_leaks("vLLM's frontend keeps threads and sockets until its process ends")
def test_rotary_frequencies_are_those_that_a_trainer_fixes(tmp_path: Path) -> None:
    """Of requests that are shorter than the original context, in an engine for longer ones."""
    model = save_model(tmp_path / "model", "phi3-longrope")
    fix_rotary_frequencies(model, 256)
    (asked,) = requests(1, max_new_tokens=20, temperature=1.0)
    prompt = asked["tokens"].tolist()

    async def body() -> None:
        engine = VllmEngine(
            model_path=str(tmp_path / "model"),
            dtype="float32",
            device="cpu",
            max_context_len=256,
            max_num_seqs=4,
            load_weights=True,
        )
        async with running(engine):
            results = await results_of(engine, [asked])

        completion = results[asked["id"]]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + completion.tokens])).logits[0]
        expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        chosen = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert torch.tensor(completion.logprobs).allclose(chosen, atol=1e-4)

    asyncio.run(body())


@pytest.mark.umbra_allow_leaks("vLLM's frontend keeps threads and sockets until its process ends")
def test_a_head_of_its_own_is_updated_by_one_recorded_plan_though_the_config_ties_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM prepacks linear layers and embeddings for the CPU; the norms are left to the plan."""
    kind = "qwen3-untied"
    folder = tmp_path / "model"
    save_model(folder, kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (prompt,) = long_prompts(1)
    asked = [wire_request(i, prompt, max_new_tokens=12, temperature=0.0) for i in range(4)]
    caplog.set_level(logging.DEBUG, "umbra.engines.shell.adapter_engine")

    async def body() -> None:
        engine = VllmEngine(
            model_path=str(folder),
            dtype="float32",
            device="cpu",
            max_context_len=512,
            max_num_seqs=4,
        )
        async with running(engine):
            for version in (1, 2, 3):
                model = make_model(kind, version)
                await engine.pause("keep")
                await publish(engine, dict(model.named_parameters()), version, tmp_path)
                results = await results_of(engine, [asked[version]])
                expected = greedy_of_transformers(model, prompt, 12)
                assert results[version].tokens == expected

    asyncio.run(body())
    loads = [record.message for record in caplog.records if "recorded copies" in record.message]
    assert [text.partition(" (")[0] for text in loads] == [
        f"vLLM: {how} 9 recorded copies and the engine's loader for 10 layers"
        for how in ("recorded a load: later weights take", *["loaded weights by"] * 2)
    ]
