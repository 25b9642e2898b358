"""Dispatcher and engine cores in one process: a trajectory may be cut after any token.

There are no processes, sockets and clocks; `make chaos` has those.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rollout_samples import make_trajectory

from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_worker import load_checkpoint
from umbra.engines.embedded.scheduler import Limits
from umbra.runtime.engine_api.decoder_config import load_model_config
from umbra.runtime.engine_api.generation_request import parse_request
from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Trajectory, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.rollout_config import SamplingOptions

MAX_CONTEXT_LEN = 64
LIMITS = Limits(
    max_num_seqs=8, max_context_len=MAX_CONTEXT_LEN, kv_cache_num_tokens=8 * MAX_CONTEXT_LEN
)


class CoreLink:
    """One incarnation of an engine: takes requests as a link does, works on the test's demand."""

    def __init__(self, engine: EngineId, model: DecoderModel, version: int) -> None:
        self.engine = engine
        self.core = EngineCore(model, LIMITS)
        self.core.set_version(version)

    def send(self, request: dict[str, Any]) -> None:
        self.core.add([parse_request(request, max_context_len=MAX_CONTEXT_LEN, vocab_size=None)])

    def withdraw(self, request_ids: list[int]) -> None:
        self.core.abort(request_ids)

    def deliver(self, dispatcher: Dispatcher) -> None:
        batch = self.core.take_deltas()
        if batch is not None:
            wire = DeltaBatch.from_wire(cast("dict[str, Any]", batch))
            dispatcher.on_batch(self.engine, wire)


@pytest.fixture(scope="module")
def model(umbra_tiny_model_dir: Path) -> Iterator[DecoderModel]:
    with torch.inference_mode():
        model = DecoderModel(
            load_model_config(str(umbra_tiny_model_dir)),
            max_context_len=MAX_CONTEXT_LEN,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        load_checkpoint(str(umbra_tiny_model_dir), model.parameters)
        yield model


def run(model: DecoderModel, temperature: float, chance: random.Random | None) -> list[Trajectory]:
    """Trajectories of two engines, to which bad things happen where there is a `chance`."""
    failures: list[UmbraError] = []
    dispatcher = Dispatcher(
        Router(8, 8), failures.append, Recorder(None, failures.append), clock=lambda: 0.0
    )
    links = [CoreLink(EngineId(name, 1), model, 1) for name in ("a", "b")]
    for link in links:
        dispatcher.attach(link.engine, link)
        dispatcher.set_serving(link.engine, True)
    ended: list[str] = []
    samples = [
        make_trajectory([3 + idx, 5], sample_id=f"s{idx}", seed=idx, max_context_len=34)
        for idx in range(16)
    ]
    for sample in samples:
        turn = Turn(
            trajectory=sample,
            group=None,
            start=0,
            limit=32,
            sampling=SamplingOptions(temperature=temperature, stop_token_ids=[1, 40]),
            on_end=lambda turn, _reason: ended.append(turn.trajectory.sample_id),
        )
        dispatcher.submit(turn)
    while len(ended) < len(samples):
        for place, link in enumerate(links):
            link.core.step()
            if chance is not None:
                links[place] = disturb(link, dispatcher, model, chance)
            links[place].deliver(dispatcher)
        dispatcher.check_integrity()
    assert sorted(ended) == sorted(sample.sample_id for sample in samples)
    assert not failures
    return samples


def disturb(
    link: CoreLink, dispatcher: Dispatcher, model: DecoderModel, chance: random.Random
) -> CoreLink:
    """Mostly nothing; else new weights, an abort, or death with the last tokens undelivered."""
    match chance.choices(["nothing", "new version", "abort", "death"], [16, 2, 1, 1])[0]:
        case "new version":
            link.core.abort()
            link.core.set_version(link.core.version + 1)
        case "abort":
            link.core.abort()
        case "death":
            dispatcher.detach(link.engine)
            next_life = EngineId(link.engine.name, link.engine.incarnation + 1)
            link = CoreLink(next_life, model, link.core.version)
            dispatcher.attach(next_life, link)
            dispatcher.set_serving(next_life, True)
        case _:
            pass
    return link


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_cut_trajectories_equal_whole_ones(model: DecoderModel, temperature: float) -> None:
    wanted = run(model, temperature, None)
    found = run(model, temperature, random.Random(11))

    for one, other in zip(wanted, found, strict=True):
        assert other.tokens.tolist() == one.tokens.tolist()
        assert other.logprobs.tolist() == one.logprobs.tolist()
    assert all(one.num_interruptions == 0 for one in wanted)
    assert sum(other.num_interruptions for other in found) > 15
    assert sum(len(other.segments()) > 1 for other in found) > 4
