"""umbra's vLLM or SGLang engine beside the bare library: the same engine and the same requests.

64 concurrent requests (256 on a GPU) of 128 new tokens. The bare side has one task a request:
`AsyncLLM.generate`, or SGLang's `async_generate`, which answers when the request ends (bare) or as
it goes (streaming). umbra always streams, so that a crash of the engine loses few tokens. The sides
alternate. Prints JSON: medians of the rounds, in tokens/s, and umbra's share of the bare speed.

    .venv-vllm/bin/python tests/bench/adapter_speed.py [--rounds 7] [--device cuda]
    python tests/bench/adapter_speed.py --engine sglang --device cuda
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from qwen3_shapes import SHAPES, save_model

from umbra.engines.sglang.sglang_engine import SglangCore, SglangEngine
from umbra.engines.sglang.sglang_requests import generate_fields
from umbra.engines.shell.adapter_engine import AdapterEngine
from umbra.engines.vllm.vllm_engine import VllmCore, VllmEngine, sampling_params
from umbra.runtime.engine_api.generation_request import GenerationRequest, parse_request

NUM_REQUESTS = {"cpu": 64, "cuda": 256}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, MAX_CONTEXT_LEN = 32, 128, 1024
SMALL = {**SHAPES["tiny"], "hidden_size": 128, "intermediate_size": 256}
MEDIUM = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {"0.4M": SMALL, "30M": SMALL | MEDIUM, "0.6B": SHAPES["0.6B"]}


def make_requests(vocab_size: int, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "id": idx,
            "tokens": rng.integers(0, vocab_size, NUM_PROMPT_TOKENS).astype(np.int32),
            "position": 0,
            "seed": idx,
            "max_new_tokens": NUM_NEW_TOKENS,
            "temperature": 1.0,
            "stop_token_ids": [],
        }
        for idx in range(count)
    ]


async def ask_vllm(core: VllmCore, key: str, request: GenerationRequest) -> int:
    """The number of tokens of the answer."""
    count = 0
    prompt = core.library.tokens_input(request.tokens.tolist(), cache_salt="bare")
    params = sampling_params(core.library, request, core.vocab_size)
    llm: Any = core._llm
    async for output in llm.generate(prompt, params, key):
        count += len(output.outputs[0].token_ids)
    return count


async def ask_sglang(
    core: SglangCore, key: str, request: GenerationRequest, *, streams: bool = False
) -> int:
    fields = generate_fields(request, key, "bare", 1) | {"stream": streams}
    frontend: Any = core._frontend
    asked = core.library.GenerateReqInput(**fields)
    count = 0
    async with aclosing(frontend.generate_request(asked)) as answers:
        async for answer in answers:
            count = answer["meta_info"]["completion_tokens"]
    return count


Ask = Callable[..., Coroutine[Any, Any, int]]
BARE: dict[str, dict[str, Ask]] = {
    "vllm": {"bare": ask_vllm},
    "sglang": {"bare": ask_sglang, "streaming": partial(ask_sglang, streams=True)},
}


async def run_bare(
    engine: AdapterEngine, ask: Ask, asked: list[dict[str, Any]], serial: str
) -> float:
    """Seconds for all requests, as a program on the library alone would do it."""
    core: Any = engine._core
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                ask(
                    core,
                    f"{serial}-{raw['id']:06d}",
                    parse_request(raw, max_context_len=MAX_CONTEXT_LEN, vocab_size=None),
                )
            )
            for raw in asked
        ]
    took_s = time.perf_counter() - started
    assert sum(task.result() for task in tasks) == NUM_NEW_TOKENS * len(asked)
    return took_s


async def run_adapter(engine: AdapterEngine, asked: list[dict[str, Any]]) -> float:
    count = num_finished = 0
    started = time.perf_counter()
    async with aclosing(engine.deltas()) as batches:
        await engine.submit(asked)
        async for batch in batches:
            count += len(batch["tokens"])
            num_finished += len(batch["finished_ids"])
            if num_finished == len(asked):
                break
    took_s = time.perf_counter() - started
    assert count == NUM_NEW_TOKENS * len(asked)
    return took_s


async def measure(shape: dict[str, Any], given: argparse.Namespace) -> dict[str, float]:
    asked = make_requests(shape["vocab_size"], NUM_REQUESTS[given.device])
    seconds: dict[str, list[float]] = defaultdict(list)
    make: Callable[..., AdapterEngine] = SglangEngine if given.engine == "sglang" else VllmEngine
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), shape, DTYPES[given.device])
        engine = make(
            model_path=folder,
            dtype=DTYPES[given.device],
            device=given.device,
            max_num_seqs=len(asked),
            max_context_len=MAX_CONTEXT_LEN,
            kv_cache_num_tokens=len(asked) * 2 * (NUM_PROMPT_TOKENS + NUM_NEW_TOKENS),
            load_weights=True,
            engine_args=given.engine_args,
        )
        async with engine, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            for idx in range(given.rounds + 1):
                taken_s = {
                    name: await run_bare(engine, ask, asked, f"{name}-{idx:04d}")
                    for name, ask in BARE[given.engine].items()
                }
                taken_s["umbra"] = await run_adapter(engine, asked)
                if idx:  # the first round warms up
                    for name, value in taken_s.items():
                        seconds[name].append(value)
            running.cancel()
    num_tokens = NUM_NEW_TOKENS * len(asked)
    speeds = {side: num_tokens / statistics.median(times) for side, times in seconds.items()}
    shares = {f"share of {name}": speeds["umbra"] / speeds[name] for name in BARE[given.engine]}
    return {name: round(value, 3) for name, value in (speeds | shares).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=list(BARE), default="vllm")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=list(NUM_REQUESTS), default="cpu")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    parser.add_argument("--shapes", nargs="+", choices=list(MODELS), default=["0.4M", "30M"])
    given = parser.parse_args()
    found = {name: asyncio.run(measure(MODELS[name], given)) for name in given.shapes}
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
