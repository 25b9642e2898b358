"""When faults come: by the settings and the seed alone, checked against a naive model."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.engines.faulty.faulty_engine import (
    CALLS,
    DueFault,
    Fault,
    FaultSchedule,
    fault_points,
    parse_faults,
)
from umbra.runtime.errors import ConfigError


def fault(**values: Any) -> Fault:
    (parsed,) = parse_faults([values])
    return parsed


def schedule(*faults: Fault, seed: int = 7, engine: str = "policy-0", life: int = 1) -> Any:
    return FaultSchedule(faults, seed=seed, engine=engine, incarnation=life)


def points_hit(
    faults: FaultSchedule, batches: list[int]
) -> list[tuple[int, int, float]]:  # (batch, point, draw)
    found: list[tuple[int, int, float]] = []
    for idx, num_tokens in enumerate(batches):
        found += [(idx, due.point, due.draw) for due in faults.on_batch(num_tokens)]
    return found


DROPS = fault(kind="drop", every_tokens=50)
BATCHES = [16] * 200


@pytest.mark.parametrize("change", [{"seed": 8}, {"engine": "policy-1"}, {"life": 2}])
def test_another_seed_engine_or_incarnation_has_other_points(change: dict[str, Any]) -> None:
    assert points_hit(schedule(DROPS, **change), BATCHES) != points_hit(schedule(DROPS), BATCHES)


def test_points_are_the_same_on_every_machine() -> None:
    hits = points_hit(schedule(DROPS), [1] * 300)

    assert [point for _, point, _ in hits] == [12, 46, 47, 81, 130, 133, 237, 254, 257]


def test_two_faults_alike_have_points_of_their_own() -> None:
    dues: list[DueFault] = []
    both = schedule(DROPS, DROPS)
    for _ in range(300):
        dues += both.on_batch(1)

    points = [due.point for due in dues]
    assert len(set(points)) > 0.8 * len(points)


@given(
    mean=st.floats(1, 200),
    after=st.integers(0, 100),
    times=st.none() | st.integers(1, 5),
    seed=st.integers(0, 1000),
    batches=st.lists(st.integers(1, 100), max_size=60),
)
def test_every_batch_that_reaches_a_point_suffers_once_and_no_other(
    mean: float, after: int, times: int | None, seed: int, batches: list[int]
) -> None:
    values = {} if times is None else {"times": times}
    drops = fault(kind="drop", after_tokens=after, every_tokens=mean, **values)
    points = fault_points(drops, random.Random(f"{seed}/policy-0/1/0/points"))
    known = list(islice(points, sum(batches) + 1))
    assert known == sorted(set(known))
    assert known[0] > after

    hits = points_hit(schedule(drops, seed=seed), batches)

    expected: list[tuple[int, int]] = []
    total = 0
    for idx, num_tokens in enumerate(batches):
        inside = [point for point in known if total < point <= total + num_tokens]
        expected += [(idx, inside[0])] if inside else []
        total += num_tokens
    assert [(idx, point) for idx, point, _ in hits] == expected[:times]
    assert all(0 <= draw < 1 for _, _, draw in hits)


@given(
    after=st.integers(0, 200),
    times=st.integers(1, 5),
    batches=st.lists(st.integers(1, 100), max_size=20),
)
def test_without_a_mean_distance_times_are_batches_that_follow_each_other(
    after: int, times: int, batches: list[int]
) -> None:
    hits = points_hit(schedule(fault(kind="drop", after_tokens=after, times=times)), batches)

    reached = [idx for idx in range(len(batches)) if sum(batches[: idx + 1]) >= after]
    assert [idx for idx, _, _ in hits] == reached[:times]


@pytest.mark.parametrize("mean", [1, 3, 40.5])
def test_the_mean_distance_is_kept(mean: float) -> None:
    points = fault_points(fault(kind="drop", every_tokens=mean), random.Random(0))

    last = list(islice(points, 4000))[-1]

    assert last / 4000 == pytest.approx(mean, rel=0.1)


def test_incarnations_and_engines_limit_a_fault() -> None:
    kill = fault(kind="kill", after_tokens=0, incarnations=[1, 3], engines=["policy-0"])

    hits = {
        (engine, life): bool(schedule(kill, engine=engine, life=life).on_batch(1))
        for engine in ("policy-0", "policy-1")
        for life in (1, 2, 3)
    }

    assert [place for place, is_hit in hits.items() if is_hit] == [("policy-0", 1), ("policy-0", 3)]


def test_a_call_fails_once_its_point_is_behind() -> None:
    calls = schedule(fault(kind="error", call="submit", after_tokens=10, times=2))

    before = calls.on_call("submit")
    calls.on_batch(10)
    after = [calls.on_call(call) is not None for call in ("abort", "submit", "submit", "submit")]

    assert before is None
    assert after == [False, True, True, False]


def test_a_stream_s_error_comes_with_a_batch() -> None:
    stream = schedule(fault(kind="error", call="deltas", after_tokens=10))

    assert stream.on_call("deltas") is None
    assert [len(stream.on_batch(6)) for _ in range(3)] == [0, 1, 0]


def test_how_often_by_default() -> None:
    assert fault(kind="drop", after_tokens=5).times == 1
    assert fault(kind="drop", every_tokens=5).times is None
    assert fault(kind="kill", every_tokens=5).times == 1
    assert fault(kind="slow", every_tokens=5, for_s=1).times == 1
    assert "deltas" in CALLS
    assert "load" in CALLS


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("kill", "faults must be a list of tables, got 'kill'"),
        (["kill"], "faults[0] must be a table such as {kind = 'kill'}, got 'kill'"),
        ([{"after_tokens": 1}], "faults[0].kind is None; allowed: kill, stop, stall, slow, drop"),
        ([{"kind": ["kill"]}], "faults[0].kind is ['kill']; allowed: kill, stop"),
        ([{"kind": "explode"}], "faults[0].kind is 'explode'; allowed: kill, stop"),
        (
            [{"kind": "kill", "after_tokens": 1}, {"kind": "kill", "for_s": 1}],
            "faults[1].for_s is unknown for kind 'kill'; allowed: kind, after_tokens, every_tokens",
        ),
        ([{"kind": "kill"}], "faults[0] never comes: give it after_tokens, every_tokens or both"),
        ([{"kind": "stall", "after_tokens": 1}], "faults[0].for_s is missing: kind 'stall' needs"),
        ([{"kind": "error", "after_tokens": 1}], "faults[0].call is missing"),
        (
            [{"kind": "error", "after_tokens": 1, "call": "generate"}],
            "faults[0].call is 'generate'; allowed: submit, deltas, abort, pause",
        ),
        (
            [{"kind": "drop", "after_tokens": 1, "what": "earlier"}],
            "faults[0].what is 'earlier'; allowed: batch, run",
        ),
        (
            [{"kind": "kill", "after_tokens": 1.5}],
            "faults[0].after_tokens: Input should be a valid integer",
        ),
        (
            [{"kind": "kill", "after_tokens": True}],
            "faults[0].after_tokens: Input should be a valid integer",
        ),
        (
            [{"kind": "kill", "every_tokens": 0.5}],
            "every_tokens: Input should be greater than or equal",
        ),
        ([{"kind": "kill", "every_tokens": "9"}], "every_tokens: Input should be a valid number"),
        (
            [{"kind": "drop", "after_tokens": 1, "times": 0}],
            "times: Input should be greater than or equal",
        ),
        (
            [{"kind": "stall", "after_tokens": 1, "for_s": 0}],
            "for_s: Input should be greater than 0",
        ),
        (
            [{"kind": "kill", "after_tokens": 1, "incarnations": 1}],
            "faults[0].incarnations: Input should be a valid array",
        ),
        (
            [{"kind": "kill", "after_tokens": 1, "engines": "policy-0"}],
            "faults[0].engines: Input should be a valid array",
        ),
    ],
)
def test_a_wrong_fault_is_named_with_what_is_allowed(raw: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(raw)

    assert words in str(caught.value)
