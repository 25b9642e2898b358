"""The requests of the conformance suite, and how it sends them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
from engine_runs import Collector, Engine, collect, wire_request
from model_factory import make_model
from torch import Tensor

VOCAB_SIZE = 97
MakeEngine = Callable[..., Engine]


def requests(count: int, **changes: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        wire_request(i, rng.integers(0, VOCAB_SIZE, 5 + i).tolist(), **changes)
        for i in range(count)
    ]


def weights(kind: str, seed: int = 0) -> dict[str, Tensor]:
    model = make_model(kind, seed).double()
    return dict(model.named_parameters(remove_duplicate=True))


async def results_of(engine: Engine, wanted: list[dict[str, Any]]) -> Collector:
    collector = Collector()
    await engine.submit(wanted)
    await collect(engine, collector, len(wanted))
    return collector


async def read_until(engine: Engine, collector: Collector, enough: Callable[[], bool]) -> None:
    async with aclosing(engine.deltas()) as batches:
        async for batch in batches:
            collector.apply(batch)
            if enough():
                return
