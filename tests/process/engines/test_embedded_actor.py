"""The embedded engine's process-level promises: errors surface, memory goes, starts are quick."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import engine_runs
import pytest
import torch
from engine_runs import (
    Collector,
    collect,
    make_request,
    on_the_engines_loop,
    run_async,
    running,
    wire_request,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.runtime.errors import ConfigError, DataError, EngineError

HELPERS = Path(engine_runs.__file__).parent
DEADLINE_S = 60.0


def run_program(code: str, *args: str) -> Any:
    """Runs Python code in a process of its own; the JSON it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@on_the_engines_loop
async def test_a_failing_step_fails_the_actor_every_call_and_the_stream(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(core: EngineCore) -> None:
        raise RuntimeError("the accelerator fell out of the slot")

    engine = EmbeddedEngine(
        model_path=str(model_folder("qwen3")), max_context_len=64, load_weights=True
    )
    async with engine, asyncio.TaskGroup() as tasks:
        life = tasks.create_task(asyncio.wait([tasks.create_task(outcome_of(engine.run()))]))
        async with aclosing(engine.deltas()) as batches:
            await anext(batches)
            monkeypatch.setattr(EngineCore, "step", explode)
            await engine.submit([wire_request(1, [1])])
            with pytest.raises(EngineError, match="fell out of the slot"):
                await anext(batches)
        with pytest.raises(EngineError, match="fell out of the slot"):
            await engine.stats()
        ((ended,), _) = await life
        error = ended.result()
        assert isinstance(error, EngineError)
        assert "RuntimeError" in str(error)
        assert error.__cause__ is not None


async def outcome_of(running_forever: Any) -> BaseException | None:
    try:
        await running_forever
    except EngineError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"model_path": "/nowhere"}, DataError, "'/nowhere' does not exist"),
        ({"dtype": "float8"}, ConfigError, "'float8' is not supported"),
        ({"device": "tpu"}, ConfigError, "'tpu' is not supported"),
        ({"device": "cuda"}, ConfigError, "no usable CUDA"),
        ({"max_context_len": 1024}, ConfigError, "max_position_embeddings=512"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"kv_cache_num_tokens": 10}, ConfigError, "cannot hold one sequence"),
        ({"max_context_len": 1 << 50}, ConfigError, "max_position_embeddings=512"),
        (
            {"kv_cache_num_tokens": 1 << 40},
            ConfigError,
            r"GB of cpu memory are available: lower it",
        ),
        ({"max_num_seqs": 1 << 50}, ConfigError, "not enough memory .*: lower max_context_len"),
        ({"num_threads": 0}, ConfigError, "num_threads"),
    ],
)
@on_the_engines_loop
async def test_a_wrong_setting_fails_the_start_by_name(
    model_folder: Callable[[str], Path],
    settings: dict[str, Any],
    kind: type[Exception],
    text: str,
) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    good: dict[str, Any] = {"model_path": str(model_folder("qwen3")), "max_context_len": 64}

    with pytest.raises(kind, match=text):
        async with EmbeddedEngine(**(good | settings)):
            pass


def test_a_context_beyond_the_machine_s_memory_fails_the_start_by_name(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "long"
    shutil.copytree(model_folder("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 50
    (folder / "config.json").write_text(json.dumps(config))

    async def body(max_context_len: int) -> None:
        with pytest.raises(ConfigError, match="lower max_context_len"):
            async with EmbeddedEngine(model_path=str(folder), max_context_len=max_context_len):
                pass

    run_async(lambda: body(1 << 40))
    run_async(lambda: body(1 << 50))


@pytest.mark.slow
@on_the_engines_loop
async def test_broken_weights_end_requests_with_an_error_not_the_engine(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    from local_sync import publish
    from model_factory import make_model

    def tensors() -> dict[str, torch.Tensor]:
        return dict(make_model("qwen3").named_parameters())

    engine = EmbeddedEngine(model_path=str(model_folder("qwen3")), max_context_len=64)
    async with running(engine):
        broken = {name: torch.full_like(t, float("nan")) for name, t in tensors().items()}
        await publish(engine, broken, 1, tmp_path)
        await engine.submit([wire_request(1, [1, 2])])
        collector = Collector()
        await collect(engine, collector, 1)
        await publish(engine, tensors(), 2, tmp_path)
        await engine.submit([wire_request(2, [1, 2])])
        await collect(engine, collector, 2)

    assert collector[1].reason is not None
    assert collector[1].reason.startswith("error: ")
    assert collector[1].tokens == []
    assert collector[2].reason == "length"


@on_the_engines_loop
async def test_a_request_that_has_ended_is_delivered_before_the_next_tick(
    model_folder: Callable[[str], Path],
) -> None:
    """A tool or the next turn of an agent waits for it, while other requests continue."""
    engine = EmbeddedEngine(
        model_path=str(model_folder("qwen3")),
        max_context_len=500,
        tick_ms=1e6,
        load_weights=True,
    )
    async with running(engine), aclosing(engine.deltas()) as batches:
        await engine.submit([wire_request(i, [1], max_new_tokens=480) for i in range(8)])
        await engine.submit([wire_request(8, [1], max_new_tokens=20)])
        collector = Collector()
        while collector[8].reason is None:
            collector.apply(await anext(batches))
        stats = await engine.stats()
    assert (collector[8].reason, len(collector[8].tokens)) == ("length", 20)
    assert stats["running"] == 8


@on_the_engines_loop
async def test_a_cancelled_pause_leaves_an_engine_that_answers(
    model_folder: Callable[[str], Path],
) -> None:
    engine = EmbeddedEngine(
        model_path=str(model_folder("qwen3")), max_context_len=500, load_weights=True
    )
    async with running(engine):
        await engine.submit([wire_request(i, [1], max_new_tokens=490) for i in range(9)])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.pause("drain")

        await engine.resume()

        assert (await engine.stats())["running"] == 9
        assert await engine.abort(None) == 9


def test_requests_of_one_call_share_their_prompt_s_prefill(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_runs import load_model, make_core, run_to_end

    from umbra.engines.embedded.decoder_model import DecoderModel

    shapes: list[tuple[int, ...]] = []
    prefill = DecoderModel.prefill

    def watched(self: DecoderModel, token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(token_ids.shape))
        return prefill(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(DecoderModel, "prefill", watched)
    core = make_core(load_model(model_folder("qwen3")))

    run_to_end(core, [make_request(i, [1, 2, 3 + i // 4]) for i in range(8)])

    assert shapes == [(2, 3)]


MEMORY = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[2])
from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from engine_runs import Collector, collect, running, wire_request

LEVEL, TAGS = int(sys.argv[3]), sys.argv[4].split()

async def fill(engine):
    # As many tokens as the cache holds: every row gets used.
    wanted = [wire_request(i, [i + 1] * 509, max_new_tokens=3, temperature=0.0) for i in range(32)]
    await engine.submit(wanted)
    results = Collector()
    await collect(engine, results, len(wanted))
    return [results[i].tokens for i in range(len(wanted))]

async def main():
    engine = EmbeddedEngine(
        model_path=sys.argv[1], max_context_len=512, max_num_seqs=32,
        kv_cache_num_tokens=32 * 512, load_weights=True,
    )
    facts = {}
    async with running(engine):
        before = await fill(engine)
        facts["awake"] = await engine.stats()
        await engine.pause("abort")
        await engine.sleep(LEVEL, TAGS)
        facts["asleep"] = await engine.stats()
        await engine.wake(["weights", "kv_cache"])
        if LEVEL == 1 or "weights" not in TAGS:
            await engine.resume()
            facts["same"] = await fill(engine) == before
    print(json.dumps(facts))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 110 MB of weights and, with 16,384 tokens, 134 MB of KV cache; quick to compute."""
    folder = tmp_path_factory.mktemp("big")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=200_000,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("level", "tags", "freed_parts"),
    [
        (1, "weights kv_cache", ["kv"]),  # on the CPU, the host is where the weights are
        (2, "weights kv_cache", ["kv", "weights"]),
        (2, "kv_cache", ["kv"]),
        (2, "weights", ["weights"]),
    ],
)
def test_sleep_gives_memory_back_to_the_operating_system(
    big_model: Path, level: int, tags: str, freed_parts: list[str]
) -> None:
    facts = run_program(MEMORY, str(big_model), str(HELPERS), str(level), tags)

    awake, asleep = facts["awake"], facts["asleep"]
    freeable = sum(awake[f"{part}_nbytes"] for part in freed_parts)
    freed = awake["resident_nbytes"] - asleep["resident_nbytes"]
    assert freeable > 50e6
    assert freed >= 0.9 * freeable
    for part in ("kv", "weights"):
        kept = 0 if part in freed_parts else awake[f"{part}_nbytes"]
        assert asleep[f"{part}_nbytes"] == kept
    assert facts.get("same", True)
