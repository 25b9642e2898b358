"""Requests of several adapters at once, beside transformers with their matrices merged in."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapter_factory import merged_model
from conformance_suite import VOCAB_SIZE, results_of
from engine_runs import Completion, Engine, wire_request

NUM_TOKENS = 12
TOLERANCE = 1e-4
DIFFERENCE = 0.1  # what another adapter makes of it, at least


def asked_of_each(names: list[str], num_prompts: int, **changes: Any) -> list[dict[str, Any]]:
    """The same prompts for every adapter, longer than a block of the prefix cache (128 tokens)."""
    prompts = np.random.default_rng(5).integers(0, VOCAB_SIZE, (num_prompts, 150)).tolist()
    fields: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.7} | changes
    return [
        wire_request(100 * which + i, prompt, lora=name, **fields)
        for which, name in enumerate(names)
        for i, prompt in enumerate(prompts)
    ]


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


async def check_each(
    engine: Engine,
    kind: str,
    seed: int,
    adapters: Mapping[str, Path],
    tolerance: float = TOLERANCE,
) -> None:
    """Without and with each adapter, in one batch: twice, the second time with cached prefixes.

    Args:
        seed: of the weights that the engine holds.
        tolerance: of a single logprob.
    """
    models: dict[str, Path | None] = {"": None, **adapters}
    for _ in range(2):
        asked = asked_of_each(list(models), 2)
        results = await results_of(engine, asked)
        for request in asked:
            found = results[request["id"]]
            _check_is(request["lora"], kind, seed, models, request, found, tolerance)


async def check_all(
    engine: Engine,
    kind: str,
    adapter: str,
    adapters: Mapping[str, Path],
    tolerance: float = TOLERANCE,
) -> None:
    """Every request has one adapter, without asking for it; twice as `check_each`."""
    models: dict[str, Path | None] = {"": None, **adapters}
    for _ in range(2):
        asked = asked_of_each([""], 4)
        results = await results_of(engine, asked)
        for request in asked:
            found = results[request["id"]]
            _check_is(adapter, kind, 0, models, request, found, tolerance)


def _check_is(
    expected: str,
    kind: str,
    seed: int,
    models: Mapping[str, Path | None],
    request: dict[str, Any],
    found: Completion,
    tolerance: float,
) -> None:
    """The output is that of one of the models, and of no other."""
    assert len(found.tokens) == NUM_TOKENS
    for name, adapter in models.items():
        error = logprob_error(kind, seed, adapter, request, found)
        if name == expected:
            assert error < tolerance, f"of {name!r}"
        else:
            assert error > max(DIFFERENCE, tolerance), f"{expected!r} is as {name!r}"
