"""Every kind of injected fault against a real supervisor and manager.

Whatever happens to one of two engines, or both, the batch is that of an undisturbed run: the same
tokens, because they depend on seed, position and context alone, and the logprobs of the published
weights.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from live_rollouts import VOCAB_SIZE, LiveRollouts, merged, while_generating

from umbra.engines.echo.echo_engine import EchoTokens, echo_logprobs, weights_fingerprint
from umbra.runtime.cluster.placement import PoolMode
from umbra.runtime.rollout.manager.admission import PromptOrder, trajectory_seed
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process]

BUDGET = 64
WEIGHTS = {"w": torch.arange(10.0)}
FINGERPRINT = weights_fingerprint([WEIGHTS["w"].numpy().tobytes()])
ENGINE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "tokens_per_s": 200.0,  # so that faults come in the middle
    "weights_in_logprobs": True,
    "max_num_seqs": 16,
    "tick_ms": 10.0,
}


@dataclass(frozen=True, slots=True)
class Completion:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


Completions = dict[str, Completion]


def undisturbed(step: int) -> Completions:
    """The expected samples of a step."""
    order = PromptOrder(8, seed=0)
    completions: Completions = {}
    for place in range(4):
        epoch, prompt = order.at(step * 4 + place)
        for k in range(4):
            seed = trajectory_seed(0, epoch, prompt, k)
            drawn = EchoTokens(seed, [prompt + 1, 2, 3], vocab_size=VOCAB_SIZE).draw(BUDGET)
            logprobs = echo_logprobs(drawn.keys, FINGERPRINT)
            completions[f"e{epoch}/p{prompt}/{k}"] = Completion(
                drawn.tokens.tolist(), logprobs.tolist()
            )
    return completions


def assert_whole(batches: list[dict[str, Any]], wanted: Completions) -> None:
    """Every sample is there once, with the tokens and logprobs of the undisturbed run."""
    samples = merged(batches)
    assert {name: sample["completion"] for name, sample in samples.items()} == {
        name: completion.tokens for name, completion in wanted.items()
    }
    for name, sample in samples.items():
        assert sample["logprobs"] == wanted[name].logprobs


def start_live(
    session: Session,
    folder: Path,
    *faults: dict[str, Any],
    config: dict[str, Any],
    seed: int = 7,
    pool_mode: PoolMode = "standalone",
    max_restarts: int = 5,
    **pool: Any,
) -> LiveRollouts:
    """Two engines that are as faulty as asked for, and all that a batch needs."""
    return LiveRollouts(
        session,
        folder,
        pool_mode=pool_mode,
        max_restarts=max_restarts,
        pool={
            "engine": "umbra.engines.faulty.faulty_engine:FaultyEngine",
            "kwargs": {"inner": "echo", "seed": seed, "faults": list(faults), **ENGINE},
            **pool,
        },
        weights=WEIGHTS,
        config={"max_new_tokens": BUDGET, **config},
    )


def injected(folder: Path, engine: str) -> list[str]:
    """The faults that an engine reports to have injected, over all its incarnations."""
    (log,) = folder.rglob(f"{engine}.log")
    return re.findall(
        r"injecting a fault: (.*) at token \d+ \(due at \d+\)$", log.read_text(), re.M
    )


def counters(live: LiveRollouts) -> dict[str, int]:
    found: dict[str, int] = live.manager.call("stats")["counters"]
    return found


# A lost engine is noticed by other signs than its silence.
PATIENT = {"delta_timeout_s": 60.0}
# An engine that loses a finish holds its request until it has been silent for so long.
IMPATIENT = {"delta_timeout_s": 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault of policy-0 in its first incarnation, and the manager's counter of it."""

    fault: dict[str, Any]
    logged: str
    counter: str
    config: dict[str, Any] = field(default_factory=lambda: PATIENT)
    pool: dict[str, Any] = field(default_factory=dict[str, Any])


CASES = {
    "kill": Case(fault={"kind": "kill"}, logged="kill", counter="engines_lost"),
    "stop": Case(
        fault={"kind": "stop"},
        logged="stop",
        counter="engines_lost",
        pool={"hung_limit_s": 2.0},
    ),
    "stall": Case(
        fault={"kind": "stall", "for_s": 600.0},
        logged="stall (600 s)",
        counter="engines_lost",
        config=IMPATIENT,
    ),
    "drop": Case(fault={"kind": "drop"}, logged="drop (batch)", counter="gaps", config=IMPATIENT),
    "repeat earlier": Case(
        fault={"kind": "repeat", "what": "earlier", "times": 3},
        logged="repeat (earlier)",
        counter="repeats",
    ),
    "lost stream": Case(
        fault={"kind": "error", "call": "deltas"},
        logged="error (deltas)",
        counter="engines_lost",
    ),
}
QUICK = {"kill", "drop", "repeat earlier"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES],
)
def test_the_batch_is_that_of_an_undisturbed_run(
    umbra_session_factory: SessionFactory,
    tmp_path: Path,
    name: str,
) -> None:
    case = CASES[name]
    fault = {"after_tokens": 100, "engines": ["policy-0"], "incarnations": [1], **case.fault}
    session = umbra_session_factory()
    live = start_live(session, tmp_path, fault, config=case.config, **case.pool)
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed(0))
    assert injected(tmp_path, "policy-0") == [case.logged] * case.fault.get("times", 1)
    assert injected(tmp_path, "policy-1") == []
    assert counters(live)[case.counter] >= 1, counters(live)
    if name == "kill":
        (note,) = [note for note in umbra_session_factory.notes if "was lost" in note]
        kept = r"\d+ trajectories keep their \d+ tokens and resume on policy-1#1$"
        assert re.search(rf"policy-0#1 was lost \(.+\): {kept}", note), note
    notes = [
        note for note in umbra_session_factory.notes if note.startswith("policy-0#1 was killed")
    ]
    assert bool(notes) == (name == "stop"), umbra_session_factory.notes
    assert all("it was stopped by a signal: no heartbeat for" in note for note in notes)


@pytest.mark.slow
def test_a_pool_that_stalls_as_a_whole_continues_once_it_can(
    umbra_session: Session, tmp_path: Path
) -> None:
    stall = {"kind": "stall", "for_s": 5.0, "after_tokens": 100}
    live = start_live(umbra_session, tmp_path, stall, config={"delta_timeout_s": 1.5})
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed(0))
    assert batches[0]["metrics"]["gen_s"] > 5.0
    assert counters(live)["engines_lost"] >= 2, "both were given up"
    assert live.processes()["policy-0"]["num_restarts"] == 0, "but not killed"


@pytest.mark.slow
def test_a_stall_may_outlast_a_sync(umbra_session: Session, tmp_path: Path) -> None:
    stall = {"kind": "stall", "for_s": 5.0, "after_tokens": 100, "engines": ["policy-0"]}
    live = start_live(umbra_session, tmp_path, stall, config=PATIENT)
    live.publish(1)
    published_at: list[float] = []

    def publish_once_it_stalls() -> None:
        while not injected(tmp_path, "policy-0"):
            time.sleep(0.005)
        live.publish(2)
        published_at.append(time.monotonic())

    with while_generating(live, 0, publish_once_it_stalls):
        batches = live.next_batch(0)
        complete_at = time.monotonic()

    assert_whole(batches, undisturbed(0))
    assert batches[0]["metrics"]["gen_s"] > 5.0
    assert complete_at - published_at[0] > 1.0, "the sync did not wait for the stall's end"
    assert counters(live)["engines_lost"] == 0


@pytest.mark.slow
def test_an_abort_that_fails_costs_the_link(umbra_session: Session, tmp_path: Path) -> None:
    place = {"after_tokens": 100, "engines": ["policy-0"]}
    faults = [{"kind": "drop", **place}, {"kind": "error", "call": "abort", **place}]
    live = start_live(umbra_session, tmp_path, *faults, config=IMPATIENT)
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed(0))
    assert injected(tmp_path, "policy-0") == ["drop (batch)", "error (abort)"]
    assert counters(live)["gaps"] >= 1
    assert counters(live)["engines_lost"] >= 1


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_an_engine_that_fails_on_its_way_through_a_step_is_replaced(
    umbra_session: Session, tmp_path: Path
) -> None:
    calls = (
        *("prepare_update", "load", "verify_update", "commit_update"),
        *("resume", "pause", "sleep", "wake"),
    )
    place = {"after_tokens": 0, "engines": ["policy-0"]}
    errors = [
        {"kind": "error", "call": call, "incarnations": [incarnation], **place}
        for incarnation, call in enumerate(calls, 1)
    ]
    live = start_live(
        umbra_session, tmp_path, *errors, config=PATIENT, pool_mode="hybrid",
        max_restarts=len(calls),
    )  # fmt: skip

    pool, step = umbra_session.pool("policy"), 0
    while live.processes()["policy-0"]["incarnation"] <= len(calls):
        assert step < 4 * len(calls), injected(tmp_path, "policy-0")
        live.publish(step)  # a successor whose start the sleep overtook starts now
        wait_until(lambda: live.processes()["policy-0"]["state"] == "RUNNING")
        pool.pause("keep")
        pool.resume()
        assert_whole(live.next_batch(step), undisturbed(step))
        pool.sleep(2)
        if step % 2:
            pool.wake(["weights", "kv_cache"])
        step += 1

    assert injected(tmp_path, "policy-0") == [f"error ({call})" for call in calls]
    assert live.processes()["policy-1"]["num_restarts"] == 0
