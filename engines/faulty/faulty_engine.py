from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from umbra.engines.faulty.fault import DueFault, FaultSchedule, parse_faults
from umbra.runtime.actor.actor_spec import actor_context, make_target
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.engine_api.engine_protocol import Engine
from umbra.runtime.engine_api.token_deltas import DeltaColumns, Int32Array
from umbra.runtime.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class FaultyEngine:
    """Wraps another engine, and fails on purpose: the same seed fails at the same tokens again.

        manager ◀── deltas, falsified or late ── FaultyEngine ◀── deltas ── inner engine
                ─── calls, some refused ───────▶              ─── calls ──▶

    It serves chaos tests, and trials of agent loops and settings. Owns the inner engine.

    Args:
        inner: the engine that does the work: a short name, or its "module:Class".
        seed: decides the points of faults, which differ between engines and incarnations.
        faults: tables, see `Fault`.
        settings: the inner engine's.
    """

    def __init__(
        self, *, inner: str = "embedded", seed: int = 0, faults: object = (), **settings: Any
    ) -> None:
        if type(seed) is not int:
            raise ConfigError(f"seed must be a whole number, got {seed!r}")
        engine, incarnation = _actor_and_incarnation()
        self._schedule = FaultSchedule(
            parse_faults(faults), seed=seed, engine=engine, incarnation=incarnation
        )
        self._inner: Engine = make_target(engine_target(inner), settings)
        self._entered = AsyncExitStack()
        self._silent_until = 0.0  # loop time; a stall outlives the stream that met it
        self._hold_s = 0.0

    async def __aenter__(self) -> Self:
        inner: Any = self._inner
        if hasattr(inner, "__aenter__"):
            await self._entered.enter_async_context(inner)
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        return await self._entered.__aexit__(*exc_info)

    async def run(self) -> None:
        inner: Any = self._inner
        if hasattr(inner, "run"):
            await inner.run()

    async def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        async with aclosing(self._inner.deltas()) as batches:
            async for batch in batches:
                for passed in self._falsify(batch):
                    await self._hold()
                    yield passed

    def _falsify(self, batch: DeltaColumns) -> list[DeltaColumns]:
        passed = [batch]
        if len(batch["tokens"]):
            for due in self._schedule.on_batch(len(batch["tokens"])):
                passed = self._inject(due, passed)
        return passed

    def _inject(self, due: DueFault, batches: list[DeltaColumns]) -> list[DeltaColumns]:
        self._log(due)
        fault = due.fault
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "stall":
                self._silent_until = asyncio.get_running_loop().time() + fault.for_s
            case "slow":
                self._hold_s = fault.for_s
            case "drop":
                return [] if fault.what == "batch" else [_lose_run(b, due.draw) for b in batches]
            case "repeat":
                early = batches if fault.what == "batch" else [first_halves(b) for b in batches]
                return early + batches
            case "error":
                raise _error(due)
            case _:
                assert_never(fault.kind)
        return batches

    async def _hold(self) -> None:
        left_s = self._silent_until - asyncio.get_running_loop().time()
        if max(self._hold_s, left_s) > 0:
            await asyncio.sleep(max(self._hold_s, left_s))

    def _log(self, due: DueFault) -> None:
        logger.warning(
            "injecting a fault: %s at token %d (due at %d)",
            due.fault,
            self._schedule.num_tokens,
            due.point,
        )

    @staticmethod
    def _failing(
        method: Callable[Concatenate[Engine, P], Awaitable[T]],
    ) -> Callable[Concatenate[FaultyEngine, P], CoroutineType[Any, Any, T]]:
        """The inner engine's method, unless a fault of that call is due."""
        name = method.__name__

        async def call(self: FaultyEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
            due = self._schedule.on_call(name)
            if due is not None:
                self._log(due)
                raise _error(due)
            inner: Callable[P, Awaitable[T]] = getattr(self._inner, name)
            return await inner(*args, **kwargs)

        return call

    submit = _failing(Engine.submit)
    abort = _failing(Engine.abort)
    pause = _failing(Engine.pause)
    resume = _failing(Engine.resume)
    sleep = _failing(Engine.sleep)
    wake = _failing(Engine.wake)
    probe_import = _failing(Engine.probe_import)
    prepare_update = _failing(Engine.prepare_update)
    load = _failing(Engine.load)
    verify_update = _failing(Engine.verify_update)
    commit_update = _failing(Engine.commit_update)
    abort_update = _failing(Engine.abort_update)
    stats = _failing(Engine.stats)

    def progress(self) -> object | None:
        """The inner engine's progress, if any: a falsified batch is no stall of the engine."""
        inner: Any = self._inner
        return inner.progress() if hasattr(inner, "progress") else None


def _actor_and_incarnation() -> tuple[str, int]:
    try:
        context = actor_context()
    except RuntimeError:  # constructed outside any actor
        return "engine", 1
    return context.name, context.incarnation


def _lose_run(batch: DeltaColumns, draw: float) -> DeltaColumns:
    num_runs = len(batch["ids"])
    return without_run(batch, int(draw * num_runs)) if num_runs else batch


def _error(due: DueFault) -> EngineError:
    return EngineError(f"a fault was injected: {due.fault}, due at token {due.point}")


def without_run(batch: DeltaColumns, run: int) -> DeltaColumns:
    """The batch without one run. All finishes stay, including the run's own request's."""
    counts = np.diff(batch["offsets"])  # [S]
    counts[run] = 0
    return _shortened(batch, counts, np.arange(len(counts)) != run)


def first_halves(batch: DeltaColumns) -> DeltaColumns:
    """The first half of every run, no finish: the whole batch then begins at earlier offsets."""
    counts = (np.diff(batch["offsets"]) + 1) // 2  # [S]
    halves = _shortened(batch, counts, np.ones(len(counts), np.bool_))
    halves["finished_ids"] = np.zeros(0, np.int64)
    halves["finish_reasons"] = []
    return halves


def _shortened(
    batch: DeltaColumns, counts: Int32Array, keeps: npt.NDArray[np.bool_]
) -> DeltaColumns:
    """The first `counts` [S] tokens of the S runs in `keeps` [S]; the others' counts are 0."""
    lengths = np.diff(batch["offsets"])
    within_run = np.arange(len(batch["tokens"])) - np.repeat(batch["offsets"][:-1], lengths)  # [N]
    has_token = within_run < np.repeat(counts, lengths)  # [N]
    offsets = np.zeros(int(keeps.sum()) + 1, np.int32)
    np.cumsum(counts[keeps], out=offsets[1:])
    return DeltaColumns(
        ids=batch["ids"][keeps],
        positions=batch["positions"][keeps],
        offsets=offsets,
        tokens=batch["tokens"][has_token],
        logprobs=batch["logprobs"][has_token],
        versions=batch["versions"][keeps],
        finished_ids=batch["finished_ids"],
        finish_reasons=batch["finish_reasons"],
    )
