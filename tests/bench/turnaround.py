"""How long an engine takes to pause, sleep, wake and resume, while 64 requests run.

    python tests/bench/turnaround.py --engine vllm --model FOLDER [--rounds 5] [--engine-args JSON]

Prints the median milliseconds as JSON. After a sleep of level 2 the weights are not loaded again,
as that is the weight update's time: what is generated from then on is noise.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import aclosing, contextmanager
from typing import Any

import numpy as np

from umbra.engines.sglang.sglang_engine import SglangEngine
from umbra.engines.shell.adapter_engine import AdapterEngine
from umbra.engines.vllm.vllm_engine import VllmEngine

NUM_REQUESTS = 64
MAX_CONTEXT_LEN = 4096
LIMIT_S = 60.0  # for every request's first token
ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine}


def make_requests(first_id: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "id": first_id + i,
            "tokens": rng.integers(1, 1000, 32).astype(np.int32),
            "position": 0,
            "seed": i,
            "max_new_tokens": MAX_CONTEXT_LEN - 64,
            "temperature": 1.0,
            "stop_token_ids": [],
        }
        for i in range(NUM_REQUESTS)
    ]


class Stopwatch:
    def __init__(self) -> None:
        self.taken_s: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.taken_s[name].append(time.perf_counter() - started)


class Reader:
    """Takes what the engine makes, and knows when every request has made a token."""

    def __init__(self, engine: AdapterEngine) -> None:
        self._engine = engine
        self._missing = set[int]()
        self._all_run = asyncio.Event()

    def expect(self, ids: Iterable[int]) -> None:
        self._missing.update(ids)
        self._all_run.clear()

    async def wait(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self._all_run.wait()

    async def run(self) -> None:
        async with aclosing(self._engine.deltas()) as batches:
            async for batch in batches:
                self._missing.difference_update(batch["ids"])
                if not self._missing:
                    self._all_run.set()


async def go_through(engine: AdapterEngine, reader: Reader, num_rounds: int) -> dict[str, float]:
    watch = Stopwatch()
    for idx in range(num_rounds + 1):
        if idx == 1:  # the round before it warmed up
            watch = Stopwatch()
        asked = make_requests(idx * NUM_REQUESTS)
        reader.expect(request["id"] for request in asked)
        await engine.submit(asked)
        await reader.wait()
        with watch("pause keep"):
            await engine.pause("keep")
        with watch("resume"):
            await engine.resume()
        with watch("pause abort"):
            await engine.pause("abort")
        # Not the engine's own: it would wait for an update of its weights.
        with watch("sleep 2"):
            await engine._core.sleep(2)
        with watch("wake weights"):
            await engine._core.wake(["weights"])
        with watch("wake kv_cache"):
            await engine._core.wake(["kv_cache"])
        with watch("resume after sleep"):
            await engine.resume()
    return {name: statistics.median(times) * 1e3 for name, times in watch.taken_s.items()}


async def measure(
    kind: str, model: str, device: str, num_rounds: int, engine_args: dict[str, Any]
) -> dict[str, float]:
    engine = ENGINES[kind](
        model_path=model,
        dtype="bfloat16",
        device=device,
        max_num_seqs=NUM_REQUESTS,
        max_context_len=MAX_CONTEXT_LEN,
        kv_cache_num_tokens=NUM_REQUESTS * MAX_CONTEXT_LEN,
        load_weights=True,
        engine_args=engine_args,
    )
    reader = Reader(engine)
    async with engine, asyncio.TaskGroup() as tasks:
        helping = [tasks.create_task(engine.run()), tasks.create_task(reader.run())]
        milliseconds = await go_through(engine, reader, num_rounds)
        for task in helping:
            task.cancel()
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm")
    parser.add_argument("--model", required=True, help="a folder with a model")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON")
    given = parser.parse_args()
    report = asyncio.run(
        measure(given.engine, given.model, given.device, given.rounds, given.engine_args)
    )
    print(json.dumps({name: round(value, 2) for name, value in report.items()}))


if __name__ == "__main__":
    main()
