from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast, get_args

from umbra.runtime.engine_api.engine_protocol import Engine
from umbra.runtime.errors import ConfigError

FaultKind = Literal["kill", "stop", "stall", "slow", "drop", "repeat", "error"]

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
assert tuple(_OWN_KEYS) == get_args(FaultKind)
_REQUIRED: Final = {"stall": ("for_s",), "slow": ("for_s",), "error": ("call",)}
_NAMES: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("drop", "what"): ("batch", "run"),
    ("repeat", "what"): ("batch", "earlier"),
    ("error", "call"): CALLS,
}
_CHECKS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "after_tokens": (lambda v: _is_whole(v, 0), "a whole number of at least 0"),
    "every_tokens": (lambda v: _is_number(v) and v >= 1, "a number of at least 1"),
    "times": (lambda v: _is_whole(v, 1), "a whole number of at least 1"),
    "for_s": (lambda v: _is_number(v) and v > 0, "a number of seconds above 0"),
    "incarnations": (
        lambda v: _is_list_of(v, lambda item: _is_whole(item, 1)),
        "a list of incarnations, such as [1, 2]",
    ),
    "engines": (
        lambda v: _is_list_of(v, lambda item: isinstance(item, str)),
        'a list of names, such as ["policy-0"]',
    ),
}


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
    after_tokens: int = 0
    every_tokens: float | None = None
    times: int | None = 1
    incarnations: frozenset[int] | None = None
    engines: frozenset[str] | None = None
    for_s: float = 0.0
    what: str = ""
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
    values = cast("Mapping[str, Any]", raw)
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _OWN_KEYS:
        raise ConfigError(f"{path}.kind is {kind!r}; allowed: {', '.join(_OWN_KEYS)}")
    allowed = ("kind", *_POINT_KEYS, *_OWN_KEYS[kind])
    for key, value in values.items():
        if key not in allowed:
            raise ConfigError(
                f"{path}.{key} is unknown for kind {kind!r}; allowed: {', '.join(allowed)}"
            )
        _check(f"{path}.{key}", value, key, kind)
    for key in _REQUIRED.get(kind, ()):
        if key not in values:
            raise ConfigError(f"{path}.{key} is missing: kind {kind!r} needs it")
    if not {"after_tokens", "every_tokens"} & values.keys():
        raise ConfigError(f"{path} never comes: give it after_tokens, every_tokens or both")
    return _make_fault(cast(FaultKind, kind), values)


def _check(path: str, value: Any, key: str, kind: str) -> None:
    names = _NAMES.get((kind, key))
    if names is not None:
        if value not in names:
            raise ConfigError(f"{path} is {value!r}; allowed: {', '.join(names)}")
    elif key in _CHECKS:
        is_right, expected = _CHECKS[key]
        if not is_right(value):
            raise ConfigError(f"{path} must be {expected}, got {value!r}")


def _make_fault(kind: FaultKind, values: Mapping[str, Any]) -> Fault:
    comes_again = "every_tokens" in values and "times" in _OWN_KEYS[kind]
    return Fault(
        kind=kind,
        after_tokens=values.get("after_tokens", 0),
        every_tokens=values.get("every_tokens"),
        times=values.get("times", None if comes_again else 1),
        incarnations=frozenset(values["incarnations"]) if "incarnations" in values else None,
        engines=frozenset(values["engines"]) if "engines" in values else None,
        for_s=values.get("for_s", 0.0),
        what=values.get("what", "batch"),
        call=values.get("call", ""),
    )


def _is_whole(value: Any, low: int) -> bool:
    return type(value) is int and value >= low


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list_of(value: Any, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_right, cast("list[Any]", value)))


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
