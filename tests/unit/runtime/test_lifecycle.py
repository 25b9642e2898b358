"""The engine lifecycle against a table written independently of it, and a naive model.

The table names, per state of the design and per event, where the engine goes; what is not in it is
illegal. Weights and cache are awake together or apart, hence the states with a suffix.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller as call
from typing import Literal

import pytest

from umbra.runtime.engine_api.lifecycle import (
    EngineLifecycle,
    EngineState,
    SleepLevel,
    Tag,
    catch_up,
)
from umbra.runtime.errors import EngineError, IllegalTransition

Event = Callable[[EngineLifecycle], EngineLifecycle]

WEIGHTS: frozenset[Tag] = frozenset({"weights"})
CACHE: frozenset[Tag] = frozenset({"kv_cache"})
BOTH: frozenset[Tag] = WEIGHTS | CACHE

TO_PENDING: list[Event] = [call("started")]
TO_UPDATING: list[Event] = [*TO_PENDING, call("begin_update", 7)]
TO_PAUSED: list[Event] = [*TO_UPDATING, call("commit_update", 7)]
TO_ASLEEP_1: list[Event] = [*TO_PAUSED, call("sleep", 1)]
TO_ASLEEP_2: list[Event] = [*TO_PAUSED, call("sleep", 2)]
PATHS: dict[str, list[Event]] = {
    "STARTING": [],
    "PENDING_WEIGHTS": TO_PENDING,
    "PENDING_WEIGHTS_NO_CACHE": [
        *TO_ASLEEP_2,
        call("wake", WEIGHTS),
        call("woken"),
    ],
    "PENDING_WEIGHTS_NO_WEIGHTS": [
        *TO_ASLEEP_2,
        call("wake", CACHE),
        call("woken"),
    ],
    "UPDATING": TO_UPDATING,
    "UPDATING_NO_CACHE": [*TO_ASLEEP_2, call("begin_update", 7)],
    "PAUSED": TO_PAUSED,
    "PAUSED_NO_CACHE": [*TO_ASLEEP_1, call("wake", WEIGHTS), call("woken")],
    "PAUSED_NO_WEIGHTS": [*TO_ASLEEP_1, call("wake", CACHE), call("woken")],
    "SERVING": [*TO_PAUSED, call("resume")],
    "ASLEEP_1": TO_ASLEEP_1,
    "ASLEEP_2": TO_ASLEEP_2,
    "WAKING_KEPT": [*TO_ASLEEP_1, call("wake", BOTH)],
    "WAKING_LOST": [*TO_ASLEEP_2, call("wake", BOTH)],
    "WAKING_WEIGHTS_LOST": [*TO_ASLEEP_2, call("wake", WEIGHTS)],
    "DEAD": [*TO_PENDING, call("died")],
}
"""How to get into each state. The version is 7 where there is one."""

EVENTS: dict[str, Event] = {
    "started": call("started"),
    "started 7": call("started", 7),
    "begin 8": call("begin_update", 8),
    "commit 7": call("commit_update", 7),
    "commit 8": call("commit_update", 8),
    "abort": call("abort_update"),
    "pause": call("pause"),
    "resume": call("resume"),
    "sleep 1": call("sleep", 1),
    "sleep 2": call("sleep", 2),
    "wake both": call("wake", BOTH),
    "wake weights": call("wake", WEIGHTS),
    "wake cache": call("wake", CACHE),
    "wake nothing": call("wake", frozenset()),
    "woken": call("woken"),
    "invalidate": call("invalidate"),
    "died": call("died"),
    "restart": call("restart"),
}

Where = Literal[
    "STARTING",
    "PENDING_WEIGHTS",
    "UPDATING",
    "PAUSED",
    "SERVING",
    "ASLEEP",
    "WAKING",
    "DEAD",
]

SLEEP_KEEPING: dict[str, tuple[Where, int | None]] = {
    "sleep 1": ("ASLEEP", 7),
    "sleep 2": ("ASLEEP", None),
}
SLEEP_UNKNOWN: dict[str, tuple[Where, int | None]] = {
    "sleep 1": ("ASLEEP", None),
    "sleep 2": ("ASLEEP", None),
}
ALLOWED: dict[str, dict[str, tuple[Where, int | None]]] = {
    "STARTING": {"started": ("PENDING_WEIGHTS", None), "started 7": ("SERVING", 7)},
    "PENDING_WEIGHTS": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        **SLEEP_UNKNOWN,
    },
    "PENDING_WEIGHTS_NO_CACHE": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake cache": ("WAKING", None),
        **SLEEP_UNKNOWN,
    },
    "PENDING_WEIGHTS_NO_WEIGHTS": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake weights": ("WAKING", None),
        **SLEEP_UNKNOWN,
    },
    "UPDATING": {"commit 7": ("PAUSED", 7), "abort": ("PENDING_WEIGHTS", None)},
    "UPDATING_NO_CACHE": {"commit 7": ("PAUSED", 7), "abort": ("PENDING_WEIGHTS", None)},
    "PAUSED": {
        "begin 8": ("UPDATING", None),
        "resume": ("SERVING", 7),
        "invalidate": ("PENDING_WEIGHTS", None),
        **SLEEP_KEEPING,
    },
    "PAUSED_NO_CACHE": {
        "begin 8": ("UPDATING", None),
        "resume": ("SERVING", 7),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake cache": ("WAKING", 7),
        **SLEEP_KEEPING,
    },
    "PAUSED_NO_WEIGHTS": {
        "begin 8": ("UPDATING", None),
        "invalidate": ("PENDING_WEIGHTS", None),
        "wake weights": ("WAKING", 7),
        **SLEEP_KEEPING,
    },
    "SERVING": {"pause": ("PAUSED", 7)},
    "ASLEEP_1": {
        "begin 8": ("UPDATING", None),
        "wake both": ("WAKING", 7),
        "wake weights": ("WAKING", 7),
        "wake cache": ("WAKING", 7),
        "invalidate": ("ASLEEP", None),
    },
    "ASLEEP_2": {
        "begin 8": ("UPDATING", None),
        "wake both": ("WAKING", None),
        "wake weights": ("WAKING", None),
        "wake cache": ("WAKING", None),
        "invalidate": ("ASLEEP", None),
    },
    "WAKING_KEPT": {"woken": ("PAUSED", 7), "invalidate": ("WAKING", None)},
    "WAKING_LOST": {"woken": ("PENDING_WEIGHTS", None), "invalidate": ("WAKING", None)},
    "WAKING_WEIGHTS_LOST": {"woken": ("PENDING_WEIGHTS", None), "invalidate": ("WAKING", None)},
    "DEAD": {"restart": ("STARTING", None)},
}
for _name, _row in ALLOWED.items():
    if _name != "DEAD":
        _row["died"] = ("DEAD", None)


def after(events: list[Event]) -> EngineLifecycle:
    lifecycle = EngineLifecycle()
    for event in events:
        lifecycle = event(lifecycle)
    return lifecycle


def awake_after(before: EngineLifecycle, event_name: str) -> frozenset[Tag]:
    """The parts of the engine that have memory after the event."""
    match event_name.split()[0]:
        case "sleep":
            return frozenset()
        case "begin":
            return before.awake | WEIGHTS
        case "woken":
            return before.awake | before.waking
        case "started" | "resume" | "died" | "restart":
            return BOTH
        case _:
            return before.awake


def check_fields(lifecycle: EngineLifecycle) -> None:
    """Each field belongs to certain states."""
    state = lifecycle.state
    assert (lifecycle.updating_to is not None) == (state == EngineState.UPDATING)
    assert (lifecycle.sleep_level is not None) == (state == EngineState.ASLEEP)
    assert bool(lifecycle.waking) == (state == EngineState.WAKING)


@pytest.mark.parametrize("event_name", EVENTS)
@pytest.mark.parametrize("state_name", PATHS)
def test_transitions_are_exactly_those_of_the_table(state_name: str, event_name: str) -> None:
    lifecycle, event = after(PATHS[state_name]), EVENTS[event_name]

    if event_name in ALLOWED[state_name]:
        state, version = ALLOWED[state_name][event_name]
        moved = event(lifecycle)
        assert (moved.state, moved.version) == (state, version)
        assert moved.awake == awake_after(lifecycle, event_name)
        check_fields(moved)
    else:
        with pytest.raises(IllegalTransition):
            event(lifecycle)


@pytest.mark.parametrize(
    ("level", "part", "state"),
    [
        (1, CACHE, "PAUSED(7)"),
        (2, CACHE, "PAUSED(7)"),
        (1, WEIGHTS, "PAUSED(7)"),
        (2, WEIGHTS, "PENDING_WEIGHTS"),
    ],
)
def test_one_part_may_sleep_and_then_the_other(
    level: SleepLevel, part: frozenset[Tag], state: str
) -> None:
    half = after(PATHS["PAUSED"]).sleep(level, part)

    assert (str(half), half.awake) == (state, BOTH - part)
    check_fields(half)
    asleep = half.sleep(level, BOTH)
    assert (str(asleep), asleep.version, asleep.awake) == (
        f"ASLEEP({level})",
        7 if level == 1 else None,
        frozenset(),
    )
    updated = half.begin_update(8).commit_update(8).resume()
    assert (str(updated), updated.awake) == ("SERVING(8)", BOTH)


def test_the_table_covers_every_state() -> None:
    assert {after(path).state for path in PATHS.values()} == set(EngineState)
    assert ALLOWED.keys() == PATHS.keys()


def test_an_illegal_request_names_state_and_event() -> None:
    with pytest.raises(EngineError, match=r"resume is not allowed in state ASLEEP\(2\)"):
        after(PATHS["ASLEEP_2"]).resume()
    with pytest.raises(IllegalTransition, match="not allowed while the weights sleep"):
        after(PATHS["PAUSED_NO_WEIGHTS"]).resume()
    with pytest.raises(IllegalTransition, match="commit version 8: the update is to 7"):
        after(PATHS["UPDATING"]).commit_update(8)
    with pytest.raises(IllegalTransition, match="cannot wake weights: asleep are kv_cache"):
        after(PATHS["PAUSED_NO_CACHE"]).wake(WEIGHTS)


def test_catch_up_picks_exactly_the_engines_without_weights() -> None:
    lifecycles = {name: after(path) for name, path in PATHS.items()}

    assert catch_up(lifecycles, current_version=7, ranks_waiting=True) == [
        "PENDING_WEIGHTS",
        "PENDING_WEIGHTS_NO_CACHE",
        "PENDING_WEIGHTS_NO_WEIGHTS",
    ]


def test_catch_up_waits_for_the_ranks_and_a_first_version() -> None:
    lifecycles = {"a": after(PATHS["PENDING_WEIGHTS"])}

    assert catch_up(lifecycles, current_version=7, ranks_waiting=False) == []
    assert catch_up(lifecycles, current_version=None, ranks_waiting=True) == []
    assert catch_up(lifecycles, current_version=0, ranks_waiting=True) == ["a"]
    own_weights = {"judge": after([call("started", 0)])}
    assert catch_up(own_weights, current_version=7, ranks_waiting=True) == []
