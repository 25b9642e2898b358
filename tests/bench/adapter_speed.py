"""umbra's vLLM engine beside a bare AsyncLLM: the same options and the same requests.

64 concurrent requests of 128 new tokens; on a GPU 256 of 512. The bare side has one task a request,
which gets its answer when the request ends, with logprobs (bare) and without. umbra always streams,
so that a crash of the engine loses few tokens. The sides alternate. Prints JSON, medians of the
rounds: tokens/s, milliseconds a decode step, processor time a step of this process, the frontend,
and of its descendants, the engine; and umbra's share of the other speeds.

    .venv-vllm/bin/python tests/bench/adapter_speed.py [--rounds 5] [--device cuda --shape 0.6B]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_report import options_parser
from qwen3_shapes import SHAPES, save_model

from umbra.engines.vllm.vllm_engine import VllmEngine
from umbra.engines.vllm.vllm_library import VllmLibrary
from umbra.engines.vllm.vllm_settings import VllmSettings
from umbra.runtime.engine_api.generation_request import GenerationRequest, parse_request
from umbra.runtime.process.descendants import living_descendants

WORKS = {"cpu": ("float32", 64, 128), "cuda": ("bfloat16", 256, 512)}
"""Device -> dtype, requests and new tokens of each."""
NUM_PROMPT_TOKENS, MAX_CONTEXT_LEN = 32, 1024
UMBRAS_OWN = ("worker_extension_cls", "scheduler_cls")


Ask = Callable[[str, GenerationRequest], Coroutine[Any, Any, int]]
"""Asks the bare library under a name; returns the number of tokens of the answer."""


def make_requests(vocab_size: int, count: int, num_new_tokens: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "id": idx,
            "tokens": rng.integers(0, vocab_size, NUM_PROMPT_TOKENS).astype(np.int32),
            "position": 0,
            "seed": idx,
            "max_new_tokens": num_new_tokens,
            "temperature": 1.0,
            "stop_token_ids": [],
        }
        for idx in range(count)
    ]


@asynccontextmanager
async def bare_vllm(settings: dict[str, Any]) -> AsyncGenerator[dict[str, Ask]]:
    library = VllmLibrary.load()
    made = VllmSettings(**settings)
    options = made.options(library.option_names(), is_cpu=library.is_cpu)
    for name, value in made.environment(is_cpu=library.is_cpu).items():
        os.environ.setdefault(name, value)
    kept = {name: value for name, value in options.items() if name not in UMBRAS_OWN}
    llm: Any = library.AsyncLLM.from_engine_args(library.AsyncEngineArgs(**kept))

    async def ask(key: str, request: GenerationRequest, *, logprobs: int | None) -> int:
        params = library.SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_new_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=library.RequestOutputKind.FINAL_ONLY,
        )
        prompt = library.tokens_input(request.tokens.tolist())
        return sum(
            [len(out.outputs[0].token_ids) async for out in llm.generate(prompt, params, key)]
        )

    try:
        yield {"without logprobs": partial(ask, logprobs=None), "bare": partial(ask, logprobs=0)}
    finally:
        llm.shutdown()


async def run_bare(ask: Ask, asked: list[dict[str, Any]], serial: str) -> int:
    """As a program on the library alone would do it. The number of tokens."""
    parsed = [parse_request(raw, max_context_len=MAX_CONTEXT_LEN, vocab_size=None) for raw in asked]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(ask(f"{serial}-{request.id:06d}", request)) for request in parsed
        ]
    return sum(task.result() for task in tasks)


async def run_adapter(engine: VllmEngine, asked: list[dict[str, Any]]) -> int:
    count = num_finished = 0
    async with aclosing(engine.deltas()) as batches:
        await engine.submit(asked)
        async for batch in batches:
            count += len(batch["tokens"])
            num_finished += len(batch["finished_ids"])
            if num_finished == len(asked):
                break
    return count


def times_s() -> np.ndarray:
    """Now, and the processor time so far of this process and of its descendants, which share it."""
    ticks = 0
    for pid, _ in living_descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return np.array([time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK")])


async def measure(shape: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    dtype, num_requests, num_steps = WORKS[given.device]
    asked = make_requests(shape["vocab_size"], num_requests, num_steps)
    seconds: dict[str, list[np.ndarray]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), shape, dtype)
        settings: dict[str, Any] = {
            "model_path": folder,
            "dtype": dtype,
            "device": given.device,
            "max_num_seqs": len(asked),
            "max_context_len": MAX_CONTEXT_LEN,
            # One block more for each, of 128 tokens on the CPU.
            "kv_cache_num_tokens": len(asked) * (NUM_PROMPT_TOKENS + num_steps + 128),
            "load_weights": True,
            "engine_args": given.engine_args,
        }
        engine = VllmEngine(**settings)
        async with engine, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            async with bare_vllm(settings) as asks:
                for idx in range(given.rounds + 1):
                    for name, ask in (*asks.items(), ("umbra", None)):
                        began = times_s()
                        if ask is None:
                            count = await run_adapter(engine, asked)
                        else:
                            count = await run_bare(ask, asked, f"{name}-{idx:04d}")
                        assert count == num_steps * len(asked)
                        if idx:  # the first round warms up
                            seconds[name].append(times_s() - began)
            running.cancel()
    found = {name: np.median(times, axis=0) for name, times in seconds.items()}
    names = ("step_ms", "frontend_cpu_ms", "engine_cpu_ms")
    return {
        name: {
            "tokens_per_s": round(num_steps * len(asked) / times[0]),
            **dict(zip(names, (times * 1000 / num_steps).round(2).tolist(), strict=True)),
            "umbra's share": round(times[0] / found["umbra"][0], 3),
        }
        for name, times in found.items()
    }


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--device", choices=list(WORKS), default="cpu")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(measure(SHAPES[given.shape], given)), indent=2))


if __name__ == "__main__":
    main()
