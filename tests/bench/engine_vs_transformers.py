"""The embedded engine beside transformers' static-batch `generate`, on the same requests.

Two cases, each measured with both sides alternating in one process on the same number of
threads; the medians of the rounds and one JSON object go to standard output:

    mixed   requests of 8 to 256 new tokens that arrive over time. transformers takes all that
            have arrived (up to its batch size) and generates to the longest of them; only the
            tokens asked for count.
    rl      128 requests of 32 new tokens at once, in groups of 8 with one prompt each.

    python tests/bench/engine_vs_transformers.py [--rounds 5] [--threads 1] [--arrival-s 0.5]
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
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from umbra.engines.embedded.embedded_engine import EmbeddedEngine

VOCAB_SIZE = 256
MAX_CONTEXT_LEN = 320


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `arrival_s` counts from the start of the case."""

    tokens: list[int]
    max_new_tokens: int
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    requests: list[Request]

    @property
    def num_tokens(self) -> int:
        return sum(request.max_new_tokens for request in self.requests)


def make_model() -> Qwen3ForCausalLM:
    """A Qwen3 shape of 0.36 M parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        max_position_embeddings=MAX_CONTEXT_LEN,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def make_cases(arrival_s: float) -> list[Case]:
    rng = np.random.default_rng(0)

    def prompt() -> list[int]:
        return rng.integers(1, VOCAB_SIZE, rng.integers(8, 49)).tolist()

    arrivals = np.sort(rng.uniform(0, arrival_s, 64))
    lengths = rng.integers(8, 257, 64)
    mixed = [
        Request(prompt(), int(num_new), float(at))
        for num_new, at in zip(lengths, arrivals, strict=True)
    ]
    groups = [[rng.integers(1, VOCAB_SIZE, 16).tolist()] * 8 for _ in range(16)]
    rl = [Request(tokens, 32, 0.0) for group in groups for tokens in group]
    return [Case("mixed", mixed), Case("rl", rl)]


async def run_umbra(engine: EmbeddedEngine, case: Case, seed: int) -> float:
    """Seconds from the first arrival until every token has come back over the delta stream."""
    start = time.perf_counter()

    async def send() -> None:
        for at in sorted({request.arrival_s for request in case.requests}):
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - start)))
            await engine.submit(
                [
                    {
                        "id": i,
                        "tokens": np.array(request.tokens, np.int32),
                        "position": 0,
                        "seed": seed * 1000 + i,
                        "max_new_tokens": request.max_new_tokens,
                        "temperature": 1.0,
                        "stop_token_ids": [],
                    }
                    for i, request in enumerate(case.requests)
                    if request.arrival_s == at
                ]
            )

    num_finished = num_tokens = 0
    async with asyncio.TaskGroup() as tasks, aclosing(engine.deltas()) as batches:
        await anext(batches)
        tasks.create_task(send())
        while num_finished < len(case.requests):
            batch = await anext(batches)
            num_tokens += len(batch["tokens"])
            num_finished += len(batch["finished_ids"])
    assert num_tokens == case.num_tokens
    return time.perf_counter() - start


@torch.inference_mode()
def run_transformers(model: Qwen3ForCausalLM, case: Case, batch_size: int) -> float:
    """Static batches of all that have arrived, padded on the left, run to their longest."""
    start = time.perf_counter()
    waiting = sorted(case.requests, key=lambda request: request.arrival_s)
    while waiting:
        now = time.perf_counter() - start
        if waiting[0].arrival_s > now:
            time.sleep(waiting[0].arrival_s - now)
            continue
        batch = [request for request in waiting if request.arrival_s <= now][:batch_size]
        waiting = waiting[len(batch) :]
        longest = max(len(request.tokens) for request in batch)
        tokens = torch.zeros((len(batch), longest), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(batch):
            tokens[row, longest - len(request.tokens) :] = torch.tensor(request.tokens)
            mask[row, longest - len(request.tokens) :] = 1
        num_new = max(request.max_new_tokens for request in batch)
        settings = GenerationConfig(
            max_new_tokens=num_new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
        settings.pad_token_id = 0
        made = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            inputs=tokens, attention_mask=mask, generation_config=settings, use_cache=True
        )
        assert made.shape[1] == longest + num_new
    return time.perf_counter() - start


def summarise(case: Case, seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    ratios = [t / u for t, u in zip(seconds["transformers"], seconds["umbra"], strict=True)]
    return {
        "num_requests": len(case.requests),
        "num_tokens": case.num_tokens,
        **{
            side: {
                "median_s": round(medians[side], 4),
                "tokens_per_s": round(case.num_tokens / medians[side]),
                "rounds_s": [round(value, 4) for value in values],
            }
            for side, values in seconds.items()
        },
        "speedup": round(statistics.median(ratios), 2),
    }


async def bench(
    model: Qwen3ForCausalLM, folder: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    engine = EmbeddedEngine(
        model_path=folder,
        max_context_len=MAX_CONTEXT_LEN,
        max_num_seqs=128,
        num_threads=arguments.threads,
        load_weights=True,
    )
    results: dict[str, Any] = {}
    async with engine:
        for case in make_cases(arguments.arrival_s):
            sides: dict[str, Callable[[int], Any]] = {
                "umbra": lambda seed, case=case: run_umbra(engine, case, seed),
                "transformers": lambda _, case=case: asyncio.to_thread(
                    run_transformers, model, case, arguments.batch_size
                ),
            }
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            for round_idx in range(arguments.rounds + 1):
                for side, run in sides.items():
                    taken = await run(round_idx)
                    if round_idx:  # the first round warms up
                        seconds[side].append(taken)
            results[case.name] = summarise(case, seconds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--arrival-s", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = make_model()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        results = asyncio.run(bench(model, folder, arguments))
    print(
        json.dumps(
            {
                "model_parameters": sum(p.numel() for p in model.parameters()),
                "threads": arguments.threads,
                **results,
            }
        )
    )


if __name__ == "__main__":
    main()
