"""A link to an engine: no request before its stream is there, refused ones are sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from rollout_samples import make_trajectory

from umbra.runtime.engine_api.token_deltas import DeltaColumns, empty_batch
from umbra.runtime.errors import EngineError, IllegalTransition, UmbraError
from umbra.runtime.rollout.dispatch import engine_fleet
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.engine_fleet import EngineLink
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.rollout_config import SamplingOptions
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.rpc.wire import ActorRef

ENGINE = EngineId("e", 1)


class PausingEngine:
    """Takes requests unless it is paused. Its stream begins a little late."""

    def __init__(self) -> None:
        self.is_paused = True
        self.has_greeted = False
        self.was_early = False  # a request came before anybody had the stream
        self.refused = asyncio.Event()
        self.took = asyncio.Event()

    def submit(self, requests: Sequence[Any]) -> None:
        self.was_early |= not self.has_greeted
        if self.is_paused:
            self.refused.set()
            raise IllegalTransition("paused")
        self.took.set()

    async def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        for _ in range(20):
            await asyncio.sleep(0)
        self.has_greeted = True
        yield empty_batch()
        await asyncio.Event().wait()


class FailingEngine(PausingEngine):
    """Fails requests whose seed is 13, without whatever was submitted with them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_failed = 0
        self.taken: list[int] = []

    def submit(self, requests: Sequence[Any]) -> None:
        seeds = [request["seed"] for request in requests]
        if 13 in seeds:
            self.num_failed += seeds == [13]
            raise EngineError("its queue is full")
        self.taken += seeds


def submit_one(dispatcher: Dispatcher, seed: int = 0) -> None:
    turn = Turn(
        trajectory=make_trajectory(seed=seed),
        group=None,
        start=0,
        limit=10,
        sampling=SamplingOptions(temperature=1.0, stop_token_ids=[]),
        on_end=lambda _turn, _reason: None,
    )
    dispatcher.submit(turn)


@asynccontextmanager
async def linked(
    folder: Path, engine: PausingEngine, on_failure: Callable[[UmbraError], None]
) -> AsyncGenerator[tuple[Dispatcher, EngineLink]]:
    """A dispatcher and its link to the engine, which is reported as serving."""
    dispatcher = Dispatcher(Router(9, 9), on_failure, Recorder(None, on_failure))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = ActorServer([engine], 1)
    endpoint = server.bind(context.socket(zmq.ROUTER), f"ipc://{folder}/e")
    ref = ActorRef(name="e", incarnation=1, node_id="n", ipc_endpoint=endpoint)
    async with asyncio.timeout(20), Client("n") as client, asyncio.TaskGroup() as tasks:
        link = EngineLink(
            ENGINE, client.handle(ref), dispatcher, delta_timeout_s=60, submit_timeout_s=60
        )
        dispatcher.attach(ENGINE, link)
        running = [tasks.create_task(server.run()), tasks.create_task(link.run())]
        link.set_serving(True)
        yield dispatcher, link
        for task in running:
            task.cancel()
    context.term()


def run_with_link(
    folder: Path, scenario: Callable[[PausingEngine, EngineLink], Awaitable[None]]
) -> None:
    """Runs `scenario` while a link to a paused engine, reported as serving, has one request."""

    async def run() -> None:
        engine, failures = PausingEngine(), list[UmbraError]()
        async with linked(folder, engine, failures.append) as (dispatcher, link):
            submit_one(dispatcher)
            await engine.refused.wait()
            await scenario(engine, link)
        assert not failures
        assert not engine.was_early

    asyncio.run(run())


def test_a_refused_request_goes_out_again_as_soon_as_the_engine_is_reported_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_fleet, "_REFUSAL_PAUSE_S", 1000.0)

    async def scenario(engine: PausingEngine, link: EngineLink) -> None:
        link.set_serving(False)
        engine.is_paused = False
        link.set_serving(True)
        await engine.took.wait()

    run_with_link(tmp_path, scenario)


def test_a_refused_request_goes_out_again_though_no_report_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_fleet, "_REFUSAL_PAUSE_S", 0.01)

    async def scenario(engine: PausingEngine, link: EngineLink) -> None:
        engine.is_paused = False
        await engine.took.wait()

    run_with_link(tmp_path, scenario)


def test_a_request_that_an_engine_always_fails_ends_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others in its batch are generated."""
    monkeypatch.setattr(engine_fleet, "_FAILURE_PAUSE_S", 0.01)

    async def run() -> None:
        engine, failures = FailingEngine(), asyncio.Queue[UmbraError]()
        async with linked(tmp_path, engine, failures.put_nowait) as (dispatcher, _):
            for seed in (12, 13, 14):
                submit_one(dispatcher, seed)
            failure = await failures.get()
            assert dispatcher.num_inflight(ENGINE) == 2
        assert engine.taken == [12, 14]
        assert engine.num_failed == 5
        assert "its queue is full" in str(failure)
        assert failures.empty()

    asyncio.run(run())
