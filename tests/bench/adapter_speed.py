"""umbra's vLLM or SGLang engine beside the bare library, on the same engine and the same requests.

64 concurrent requests (256 on a GPU) of 128 new tokens each, one task a request on the bare side:
`AsyncLLM.generate`, or SGLang's `async_generate`, which answers each request as a whole (bare) or
as it goes (streaming), as umbra must, which keeps what there is when an engine dies. The sides
alternate; what is printed as JSON are the medians of the rounds, in tokens/s, for models so small
that all is overhead (vLLM) and larger ones.

    .venv-vllm/bin/python tests/bench/adapter_speed.py [--rounds 7] [--device cuda]
    python tests/bench/adapter_speed.py --engine sglang --device cuda

`--in-turn 6`: as many requests run, and 6 times as many are sent in all. They end one after the
other, as in asynchronous training, so that many steps of the engine have a new prompt beside the
running requests.
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
from typing import Any

import numpy as np
import torch
from qwen3_shapes import QWEN3_0_6B
from transformers import Qwen3Config, Qwen3ForCausalLM

from umbra.engines.sglang.sglang_core import SglangCore
from umbra.engines.sglang.sglang_engine import SglangEngine
from umbra.engines.sglang.sglang_requests import generate_fields
from umbra.engines.shell.adapter_engine import AdapterEngine
from umbra.engines.vllm.vllm_core import VllmCore
from umbra.engines.vllm.vllm_engine import VllmEngine
from umbra.engines.vllm.vllm_requests import sampling_params
from umbra.runtime.engine_api.generation_request import GenerationRequest, parse_request

NUM_RUNNING = {"cpu": 64, "cuda": 256}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
NUM_PROMPT_TOKENS = 32
MAX_CONTEXT_LEN = 1024
SHAPES: dict[str, dict[str, Any]] = {
    "0.4M": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256},
    "30M": {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048},
}
LARGE_SHAPES = {"0.6B": QWEN3_0_6B}


def save_model(folder: str, shape: dict[str, Any], device: str) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "num_hidden_layers": 2 if shape["hidden_size"] < 512 else 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_CONTEXT_LEN,
        "tie_word_embeddings": True,
    }
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**(given | shape)))
    model.to(getattr(torch, DTYPES[device])).cpu().save_pretrained(folder)


def make_requests(
    vocab_size: int, num_running: int, num_new_tokens: int, in_turn: int
) -> list[dict[str, Any]]:
    """`in_turn` requests for each of those that run at once; together these have the same number of
    tokens. The first ones are of rising length, so that the following begin one after the other."""
    rng = np.random.default_rng(0)
    lengths = [num_new_tokens] * (in_turn * num_running)
    if in_turn > 1:
        rising = [1 + i * (num_new_tokens - 1) // num_running for i in range(num_running)]
        lengths[:num_running] = rising
        lengths[-num_running:] = [num_new_tokens - length for length in rising]
    return [
        {
            "id": i,
            "tokens": rng.integers(0, vocab_size, NUM_PROMPT_TOKENS).astype(np.int32),
            "position": 0,
            "seed": i,
            "max_new_tokens": length,
            "temperature": 1.0,
            "stop_token_ids": [],
        }
        for i, length in enumerate(lengths)
    ]


def count_tokens(asked: list[dict[str, Any]]) -> int:
    return sum(raw["max_new_tokens"] for raw in asked)


async def ask_vllm(core: VllmCore, key: str, request: GenerationRequest) -> int:
    """The number of tokens that came."""
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
    assert sum(task.result() for task in tasks) == count_tokens(asked)
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
    assert count == count_tokens(asked)
    return took_s


async def measure(kind: str, shape: dict[str, Any], given: argparse.Namespace) -> dict[str, float]:
    device, num_running = given.device, given.running or NUM_RUNNING[given.device]
    asked = make_requests(shape["vocab_size"], num_running, given.new_tokens, given.in_turn)
    seconds: dict[str, list[float]] = defaultdict(list)
    make: Callable[..., AdapterEngine] = SglangEngine if kind == "sglang" else VllmEngine
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, shape, device)
        engine = make(
            model_path=folder,
            dtype=DTYPES[device],
            device=device,
            max_num_seqs=num_running,
            max_context_len=MAX_CONTEXT_LEN,
            kv_cache_num_tokens=num_running * 2 * (NUM_PROMPT_TOKENS + given.new_tokens),
            load_weights=True,
            engine_args=given.engine_args,
        )
        async with engine, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            for idx in range(given.rounds + 1):  # the first warms up
                took_s = {
                    name: await run_bare(engine, ask, asked, f"{name}-{idx:04d}")
                    for name, ask in BARE[kind].items()
                }
                took_s["umbra"] = await run_adapter(engine, asked)
                if idx:
                    for name, value in took_s.items():
                        seconds[name].append(value)
            running.cancel()
    speeds = {
        side: count_tokens(asked) / statistics.median(times) for side, times in seconds.items()
    }
    shares = {f"share of {name}": speeds["umbra"] / speeds[name] for name in BARE[kind]}
    return speeds | shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=sorted(NUM_RUNNING), default="cpu")
    parser.add_argument("--running", type=int, help="requests at once (default: by the device)")
    parser.add_argument("--new-tokens", type=int, default=128, help="of each request")
    parser.add_argument("--in-turn", type=int, default=1, help="requests sent for each that runs")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    parser.add_argument(
        "--shapes", nargs="+", choices=sorted(SHAPES | LARGE_SHAPES), help="default: by the device"
    )
    given = parser.parse_args()
    shapes = LARGE_SHAPES if given.engine == "sglang" else SHAPES
    if given.device == "cuda":
        shapes = shapes | LARGE_SHAPES
    if given.shapes:
        shapes = {name: (SHAPES | LARGE_SHAPES)[name] for name in given.shapes}
    report = {
        name: {key: round(value, 3) for key, value in measured.items()}
        for name, shape in shapes.items()
        for measured in [asyncio.run(measure(given.engine, shape, given))]
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
