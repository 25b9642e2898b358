from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from types import CoroutineType
from typing import (
    Annotated,
    Any,
    Concatenate,
    Final,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    assert_never,
    cast,
    get_args,
)

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from umbra.runtime.actor.actor_spec import actor_context, make_target
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.engine_api.engine_protocol import Engine
from umbra.runtime.engine_api.token_deltas import DeltaColumns, Int32Array
from umbra.runtime.errors import ConfigError, EngineError
from umbra.runtime.settings import Bounds, Count, Positive, Seconds

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
CALLS: Final = tuple(name for name in vars(Engine) if not name.startswith("_"))

_POINT_KEYS: Final = ("after_tokens", "every_tokens", "incarnations", "engines")
# An incarnation is killed once, and slow from its point on, so kill and slow have no `times`.
_OWN_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill": (),
    "stop": ("times",),
    "stall": ("times", "for_s"),
    "slow": ("for_s",),
    "drop": ("times", "what"),
    "repeat": ("times", "what"),
    "error": ("times", "call"),
}

_REQUIRED: Final = {"stall": ("for_s",), "slow": ("for_s",), "error": ("call",)}
_NAMES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "drop": ("what", ("batch", "run")),
    "repeat": ("what", ("batch", "earlier")),
    "error": ("call", CALLS),
}


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


FaultKind = Literal["kill", "stop", "stall", "slow", "drop", "repeat", "error"]


assert tuple(_OWN_KEYS) == get_args(FaultKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault and the points at which it comes, as a user's table describes it:

    {kind = "drop", what = "run", every_tokens = 500, times = 2, incarnations = [1]}

    Points are counted in tokens that the engine has generated in this incarnation,
    over all requests.

    Attributes:
        kind: kill and stop are signals to the engine's own process; stall sends nothing for a
            while, slow holds back every later batch; drop and repeat falsify a batch of deltas;
            error makes a call of the protocol raise EngineError.
        after_tokens: the first point; with `every_tokens`, where counting begins.
        every_tokens: mean distance of the next points, which are drawn at random.
        times: most faults in one incarnation; None: no limit.
        incarnations: incarnations that the fault is limited to; None: all.
        engines: names of the engines that the fault is limited to; None: all.
        for_s: how long a stall lasts, or how long a slow batch is held back.
        what: drop removes a whole "batch" or one "run" in it; repeat sends a "batch" twice, or
            first a part of it and then all of it from the "earlier" offsets.
        call: the call that fails; "deltas" ends the stream with the error.
    """

    kind: FaultKind
    after_tokens: Count = 0
    every_tokens: Annotated[float, Bounds(ge=1)] | None = None
    times: Positive | None = 1
    incarnations: frozenset[Positive] | None = None
    engines: frozenset[str] | None = None
    for_s: Seconds = 0.0
    what: str = "batch"
    call: str = ""

    def concerns(self, engine: str, incarnation: int) -> bool:
        return (self.engines is None or engine in self.engines) and (
            self.incarnations is None or incarnation in self.incarnations
        )

    def __str__(self) -> str:
        match self.kind:
            case "stall" | "slow":
                return f"{self.kind} ({self.for_s:g} s)"
            case "drop" | "repeat":
                return f"{self.kind} ({self.what})"
            case "error":
                return f"error ({self.call})"
            case _:
                return self.kind


def parse_faults(raw: object) -> list[Fault]:
    """Raises ConfigError that names the fault, the key and the allowed values."""
    if not isinstance(raw, list | tuple):
        raise ConfigError(f"faults must be a list of tables, got {raw!r}")
    entries = cast("list[object]", raw)
    return [_parse_fault(f"faults[{idx}]", entry) for idx, entry in enumerate(entries)]


def _parse_fault(path: str, raw: object) -> Fault:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} must be a table such as {{kind = 'kill'}}, got {raw!r}")
    values = dict(cast("Mapping[str, Any]", raw))
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _OWN_KEYS:
        raise ConfigError(f"{path}.kind is {kind!r}; allowed: {', '.join(_OWN_KEYS)}")
    allowed = ("kind", *_POINT_KEYS, *_OWN_KEYS[kind])
    if unknown := [key for key in values if key not in allowed]:
        raise ConfigError(
            f"{path}.{unknown[0]} is unknown for kind {kind!r}; allowed: {', '.join(allowed)}"
        )
    for key in _REQUIRED.get(kind, ()):
        if key not in values:
            raise ConfigError(f"{path}.{key} is missing: kind {kind!r} needs it")
    if not {"after_tokens", "every_tokens"} & values.keys():
        raise ConfigError(f"{path} never comes: give it after_tokens, every_tokens or both")
    key, names = _NAMES.get(kind, ("", ()))
    if key in values and values[key] not in names:
        raise ConfigError(f"{path}.{key} is {values[key]!r}; allowed: {', '.join(names)}")
    if "every_tokens" in values and "times" in _OWN_KEYS[kind]:
        values.setdefault("times", None)
    infinite = [key for key, value in values.items() if value in (math.inf, -math.inf)]
    if infinite:
        raise ConfigError(f"{path}.{infinite[0]} is {values[infinite[0]]}: give a finite number")
    try:
        return TypeAdapter(Fault).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ConfigError(f"{path}.{problem['loc'][0]}: {problem['msg']}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DueFault:
    """A fault that happens now, due at token `point` of this incarnation; `draw` in [0, 1) chooses
    a part of a batch."""

    fault: Fault
    point: int
    draw: float


class FaultSchedule:
    """The faults due in one incarnation: pure, and the same arguments give the same points.

        generated tokens  0 ────────●──────────●───●────────▶
                               points, known from the seed before the first token

    A batch of deltas that reaches a point suffers the fault, a call once its point is passed.
    Several points of one fault within a batch count as one. Without `every_tokens`, the fault hits
    its next `times` batches (or calls) in a row.
    """

    def __init__(
        self, faults: Sequence[Fault], *, seed: int, engine: str, incarnation: int
    ) -> None:
        self.num_tokens = 0
        self._of_batches: list[_Timer] = []
        self._of_calls: dict[str, list[_Timer]] = {}
        for idx, fault in enumerate(faults):
            if not fault.concerns(engine, incarnation):
                continue
            timer = _Timer(fault, f"{seed}/{engine}/{incarnation}/{idx}")
            if fault.kind == "error" and fault.call != "deltas":
                self._of_calls.setdefault(fault.call, []).append(timer)
            else:
                self._of_batches.append(timer)

    def on_batch(self, num_tokens: int) -> list[DueFault]:
        self.num_tokens += num_tokens
        dues = [timer.take(self.num_tokens) for timer in self._of_batches]
        return [due for due in dues if due is not None]

    def on_call(self, call: str) -> DueFault | None:
        for timer in self._of_calls.get(call, ()):
            due = timer.take(self.num_tokens)
            if due is not None:
                return due
        return None


class _Timer:
    """The points of one fault in one incarnation; `key` seeds everything random."""

    def __init__(self, fault: Fault, key: str) -> None:
        self._fault = fault
        self._points = fault_points(fault, random.Random(f"{key}/points"))
        self._draws = random.Random(f"{key}/draws")
        self._next_point = next(self._points)
        self._num_left = fault.times

    def take(self, num_tokens: int) -> DueFault | None:
        if self._num_left == 0 or self._next_point > num_tokens:
            return None
        if self._num_left is not None:
            self._num_left -= 1
        due = DueFault(fault=self._fault, point=self._next_point, draw=self._draws.random())
        if self._fault.every_tokens is not None:
            while self._next_point <= num_tokens:
                self._next_point = next(self._points)
        return due


def fault_points(fault: Fault, rng: random.Random) -> Iterator[int]:
    """Endless: `after_tokens` again and again, or points at geometric distances after it."""
    point = fault.after_tokens
    while True:
        if fault.every_tokens is not None:
            point += _distance(fault.every_tokens, rng)
        yield point


def _distance(mean: float, rng: random.Random) -> int:
    """Geometric: 1 + the tokens before the first that is hit, with odds of 1 / mean each."""
    draw = rng.random()
    return 1 if mean == 1 else 1 + int(math.log1p(-draw) / math.log1p(-1 / mean))
