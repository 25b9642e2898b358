"""What vLLM loses to an update in the middle of completions, and to completions that come one by
one: one engine without a trainer, on one GPU.

    python tests/bench/interruptions.py --device cuda [--engine-args '{...}'] [--rounds 2]

As many completions of 512 tokens as the engine works on at a time are generated without
interruption, with a pause after three quarters that keeps their keys ("keep"), and with one that
aborts them, after which they continue from their tokens ("abort"). Then completions of different
lengths, around 48 and around 512 tokens, take each other's place: as many are with the engine as it
works on at a time, or a quarter more. Prints JSON: tokens/s, the median of the rounds, and the
smallest and the largest.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import numpy as np
from adapter_speed import MODELS
from qwen3_shapes import save_model

from umbra.engines.vllm.vllm_engine import VllmEngine
from umbra.runtime.engine_api.token_deltas import DeltaColumns

SHAPES = {"cpu": "0.4M", "cuda": "0.6B"}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
MAX_NUM_SEQS = {"cpu": 16, "cuda": 256}
NUM_PROMPT_TOKENS, MAX_CONTEXT_LEN, NUM_NEW_TOKENS = 64, 1024, 512
MEANS = {"cpu": (16,), "cuda": (48, 512)}


class Client:
    """Keeps `num_inflight` requests with the engine until all have their number of tokens."""

    def __init__(self, engine: VllmEngine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._ids = itertools.count()

    async def tokens_per_s(
        self,
        lengths: Sequence[int],
        num_inflight: int,
        mode: Literal["", "keep", "abort"] = "",
    ) -> float:
        """With a `mode`, the engine is paused and resumed after three quarters of the tokens."""
        draw = np.random.default_rng(next(self._ids))
        shape = (len(lengths), NUM_PROMPT_TOKENS)
        self._contexts = list(draw.integers(0, self._vocab_size, shape).astype(np.int32))
        self._ends = [NUM_PROMPT_TOKENS + length for length in lengths]
        self._inflight: dict[int, int] = {}
        waiting, num_tokens, total = deque(range(len(lengths))), 0, sum(lengths)
        began = time.perf_counter()
        async with aclosing(self._engine.deltas()) as batches:
            while num_tokens < total:
                num_free = min(num_inflight - len(self._inflight), len(waiting))
                if num_free:
                    chosen = [waiting.popleft() for _ in range(num_free)]
                    await self._engine.submit([self._request(which) for which in chosen])
                num_tokens += await self._take(batches, waiting)
                if mode and num_tokens >= total * 3 // 4:
                    await self._engine.pause(mode)
                    await self._engine.resume()
                    mode = ""
        return total / (time.perf_counter() - began)

    def _request(self, which: int) -> dict[str, Any]:
        request_id, context = next(self._ids), self._contexts[which]
        self._inflight[request_id] = which
        return {
            "id": request_id,
            "tokens": context,
            "position": len(context) - NUM_PROMPT_TOKENS,
            "seed": which,
            "max_new_tokens": self._ends[which] - len(context),
            "temperature": 1.0,
            "stop_token_ids": [],
        }

    async def _take(self, batches: AsyncGenerator[DeltaColumns, None], waiting: deque[int]) -> int:
        """The number of new tokens; requests that were aborted wait again."""
        batch = await anext(batches)
        bounds = batch["offsets"].tolist()
        for run, request_id in enumerate(batch["ids"].tolist()):
            which, new = self._inflight[request_id], batch["tokens"][bounds[run] : bounds[run + 1]]
            self._contexts[which] = np.concatenate([self._contexts[which], new])
        for request_id in batch["finished_ids"].tolist():
            which = self._inflight.pop(request_id)
            if len(self._contexts[which]) < self._ends[which]:
                waiting.append(which)
        return len(batch["tokens"])


async def measure(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    shape, count = MODELS[SHAPES[given.device]], MAX_NUM_SEQS[given.device]
    speeds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), shape, DTYPES[given.device])
        engine = VllmEngine(
            model_path=folder,
            dtype=DTYPES[given.device],
            device=given.device,
            max_num_seqs=count,
            max_context_len=MAX_CONTEXT_LEN,
            kv_cache_num_tokens=2 * count * MAX_CONTEXT_LEN,
            load_weights=True,
            engine_args=given.engine_args,
        )
        async with engine, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.run())
            client = Client(engine, shape["vocab_size"])
            equal = [NUM_NEW_TOKENS] * count
            await client.tokens_per_s(equal, count, "abort")  # warms up
            for _ in range(given.rounds):
                for mode in ("", "keep", "abort"):
                    speed = await client.tokens_per_s(equal, count, mode)
                    speeds.setdefault(mode or "uninterrupted", []).append(speed)
                for mean in MEANS[given.device]:
                    # From half of the mean to one and a half.
                    lengths = [mean // 2 + idx * 7 % (mean + 1) for idx in range(3 * count)]
                    for num_inflight in (count, count * 5 // 4):
                        speed = await client.tokens_per_s(lengths, num_inflight)
                        name = f"around {mean}, {num_inflight} with the engine"
                        speeds.setdefault(name, []).append(speed)
            running.cancel()
    return {
        name: {
            "tokens_per_s": round(statistics.median(found)),
            "min": round(min(found)),
            "max": round(max(found)),
        }
        for name, found in speeds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
