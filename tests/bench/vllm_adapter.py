"""umbra's vLLM engine beside bare `AsyncLLM.generate`, on the same vLLM and the same requests.

64 concurrent requests (256 on a GPU) of 128 new tokens each. The sides alternate; what is printed
as JSON are the medians of the rounds, in tokens/s, for a model so small that all is overhead and
larger ones.

    .venv-vllm/bin/python tests/bench/vllm_adapter.py [--rounds 7] [--device cuda]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import aclosing
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from umbra.engines.requests import parse_request
from umbra.engines.vllm.actor import VllmEngine
from umbra.engines.vllm.core import VllmCore
from umbra.engines.vllm.requests import sampling_params

NUM_REQUESTS = {"cpu": 64, "cuda": 256}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
NUM_NEW_TOKENS = 128
MAX_CONTEXT_LEN = 256
SHAPES: dict[str, dict[str, Any]] = {
    "0.4M": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256},
    "30M": {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048},
}
LARGE_SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


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


def make_requests(vocab_size: int, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "id": i,
            "tokens": rng.integers(0, vocab_size, 32).astype(np.int32),
            "position": 0,
            "seed": i,
            "max_new_tokens": NUM_NEW_TOKENS,
            "temperature": 1.0,
            "stop_token_ids": [],
        }
        for i in range(count)
    ]


async def run_bare(engine: VllmEngine, asked: list[dict[str, Any]], serial: int) -> float:
    """Seconds for all requests, one task each, as a program on vLLM alone would do it."""
    core = engine._core  # pyright: ignore[reportPrivateUsage]
    assert isinstance(core, VllmCore)
    llm: Any = core._llm  # pyright: ignore[reportPrivateUsage]
    count = 0

    async def one(raw: dict[str, Any]) -> None:
        nonlocal count
        request = parse_request(raw, max_context_len=MAX_CONTEXT_LEN, vocab_size=None)
        prompt = core.library.tokens_input(request.tokens.tolist(), cache_salt="bare")
        params = sampling_params(core.library, request, core.vocab_size)
        async for output in llm.generate(prompt, params, f"bare-{serial}-{request.id}"):
            count += len(output.outputs[0].token_ids)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for raw in asked:
            tasks.create_task(one(raw))
    took_s = time.perf_counter() - started
    assert count == len(asked) * NUM_NEW_TOKENS
    return took_s


async def run_adapter(engine: VllmEngine, asked: list[dict[str, Any]]) -> float:
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
    assert count == len(asked) * NUM_NEW_TOKENS
    return took_s


async def measure(shape: dict[str, Any], num_rounds: int, device: str) -> dict[str, float]:
    asked = make_requests(shape["vocab_size"], NUM_REQUESTS[device])
    seconds: dict[str, list[float]] = {"bare": [], "umbra": []}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, shape, device)
        engine = VllmEngine(
            model_path=folder,
            dtype=DTYPES[device],
            device=device,
            max_num_seqs=len(asked),
            max_context_len=MAX_CONTEXT_LEN,
            kv_cache_num_tokens=len(asked) * MAX_CONTEXT_LEN,
            load_weights=True,
        )
        async with engine, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            for idx in range(num_rounds + 1):  # the first warms up
                bare_s = await run_bare(engine, asked, idx)
                umbra_s = await run_adapter(engine, asked)
                if idx:
                    seconds["bare"].append(bare_s)
                    seconds["umbra"].append(umbra_s)
            running.cancel()
    num_tokens = len(asked) * NUM_NEW_TOKENS
    speeds = {side: num_tokens / statistics.median(times) for side, times in seconds.items()}
    return speeds | {"share": speeds["umbra"] / speeds["bare"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=sorted(NUM_REQUESTS), default="cpu")
    given = parser.parse_args()
    shapes = SHAPES | (LARGE_SHAPES if given.device == "cuda" else {})
    report = {
        name: {key: round(value, 3) for key, value in measured.items()}
        for name, shape in shapes.items()
        for measured in [asyncio.run(measure(shape, given.rounds, given.device))]
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
