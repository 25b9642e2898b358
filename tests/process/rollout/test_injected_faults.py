"""Every kind of injected fault against a real supervisor and manager, with the embedded engine.

Whatever happens to one of two engines, or both, the batch is that of an undisturbed run: the same
tokens, because in float64 they depend on seed, prompt and position alone.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import re
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_rollouts import LiveRollouts, merged, while_generating
from safetensors.torch import load_file

from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.runtime.pools.pool_spec import PoolMode
from umbra.runtime.rollout.buffer.prompt_order import PromptOrder, trajectory_seed
from umbra.runtime.session import Session
from umbra.runtime.testing.session_factory import SessionFactory

pytestmark = [pytest.mark.process]

BUDGET = 64
NUM_STEPS = 4
SETTINGS: dict[str, Any] = {"dtype": "float64", "max_context_len": 256, "max_num_seqs": 16}


@dataclass(frozen=True, slots=True)
class Completion:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


Completions = dict[str, Completion]


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir: Path) -> list[Completions]:
    """The expected samples of the steps, from one engine without a manager."""
    return [asyncio.run(generate(tiny_model_dir, step)) for step in range(NUM_STEPS)]


async def generate(model_dir: Path, step: int) -> Completions:
    order = PromptOrder(8, seed=0)
    places = [(*order.at(step * 4 + place), k) for place in range(4) for k in range(4)]
    requests: list[dict[str, Any]] = [
        {
            "id": idx,
            "tokens": np.array([prompt + 1, 2, 3], np.int32),
            "position": 0,
            "seed": trajectory_seed(0, epoch, prompt, k),
            "max_new_tokens": BUDGET,
            "temperature": 1.0,
            "stop_token_ids": [],
        }
        for idx, (epoch, prompt, k) in enumerate(places)
    ]
    completions = [Completion() for _ in requests]
    async with EmbeddedEngine(model_path=str(model_dir), load_weights=True, **SETTINGS) as engine:
        await engine.submit(requests)
        async with aclosing(engine.deltas()) as batches:
            while min(len(completion.tokens) for completion in completions) < BUDGET:
                batch = await anext(batches)
                bounds = batch["offsets"].tolist()
                for run, idx in enumerate(batch["ids"].tolist()):
                    own = slice(bounds[run], bounds[run + 1])
                    completions[idx].tokens.extend(batch["tokens"][own].tolist())
                    completions[idx].logprobs.extend(batch["logprobs"][own].tolist())
    return {f"e{e}/p{p}/{k}": completions[idx] for idx, (e, p, k) in enumerate(places)}


def assert_whole(batches: list[dict[str, Any]], wanted: Completions) -> None:
    """Every sample is there once, with the tokens and logprobs of the undisturbed run."""
    samples = merged(batches)
    assert {name: sample["completion"] for name, sample in samples.items()} == {
        name: completion.tokens for name, completion in wanted.items()
    }
    for name, sample in samples.items():
        # Other batch shapes change the last bits.
        assert sample["logprobs"] == pytest.approx(wanted[name].logprobs, abs=1e-5)


def start_live(
    session: Session,
    folder: Path,
    model_dir: Path,
    *faults: dict[str, Any],
    config: dict[str, Any],
    seed: int = 7,
    pool_mode: PoolMode = "standalone",
    **pool: Any,
) -> LiveRollouts:
    """Two engines that are as faulty as asked for, and all that a batch needs."""
    weights = load_file(str(model_dir / "model.safetensors"))
    kwargs: dict[str, Any] = {"model_path": str(model_dir), "tick_ms": 10.0, **SETTINGS}
    return LiveRollouts(
        session,
        folder,
        pool_mode=pool_mode,
        pool={
            "engine": "umbra.engines.faulty.faulty_engine:FaultyEngine",
            "kwargs": {"inner": "embedded", "seed": seed, "faults": list(faults), **kwargs},
            **pool,
        },
        weights={name: tensor.double() for name, tensor in weights.items()},
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
    "drop a run": Case(
        fault={"kind": "drop", "what": "run"},
        logged="drop (run)",
        counter="gaps",
        config=IMPATIENT,
    ),
    "repeat": Case(
        fault={"kind": "repeat", "times": 3}, logged="repeat (batch)", counter="repeats"
    ),
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
    tiny_model_dir: Path,
    undisturbed: list[Completions],
    name: str,
) -> None:
    case = CASES[name]
    fault = {"after_tokens": 100, "engines": ["policy-0"], "incarnations": [1], **case.fault}
    session = umbra_session_factory()
    live = start_live(session, tmp_path, tiny_model_dir, fault, config=case.config, **case.pool)
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed[0])
    assert injected(tmp_path, "policy-0") == [case.logged] * case.fault.get("times", 1)
    assert injected(tmp_path, "policy-1") == []
    assert counters(live)[case.counter] >= 1, counters(live)
    notes = [
        note for note in umbra_session_factory.notes if note.startswith("policy-0#1 was killed")
    ]
    assert bool(notes) == (name == "stop"), umbra_session_factory.notes
    assert all("no heartbeat for" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "delay_s"), [("stall", 1.5), ("slow", 0.3)])
def test_a_late_engine_is_waited_for(
    umbra_session: Session,
    tmp_path: Path,
    tiny_model_dir: Path,
    undisturbed: list[Completions],
    kind: str,
    delay_s: float,
) -> None:
    fault = {"kind": kind, "for_s": delay_s, "after_tokens": 100, "engines": ["policy-0"]}
    live = start_live(umbra_session, tmp_path, tiny_model_dir, fault, config=PATIENT)
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed[0])
    assert injected(tmp_path, "policy-0") == [f"{kind} ({delay_s} s)"]
    # The stalled batch is late once, the slow engine's many ones add up.
    assert batches[0]["metrics"]["gen_s"] > (delay_s if kind == "stall" else 3 * delay_s)
    assert counters(live)["engines_lost"] == 0


@pytest.mark.slow
def test_a_pool_that_stalls_as_a_whole_continues_once_it_can(
    umbra_session: Session, tmp_path: Path, tiny_model_dir: Path, undisturbed: list[Completions]
) -> None:
    stall = {"kind": "stall", "for_s": 5.0, "after_tokens": 100}
    live = start_live(
        umbra_session, tmp_path, tiny_model_dir, stall, config={"delta_timeout_s": 1.5}
    )
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed[0])
    assert batches[0]["metrics"]["gen_s"] > 5.0
    assert counters(live)["engines_lost"] >= 2, "both were given up"
    assert live.processes()["policy-0"]["num_restarts"] == 0, "but not killed"


@pytest.mark.slow
def test_a_stall_may_outlast_a_sync(
    umbra_session: Session, tmp_path: Path, tiny_model_dir: Path, undisturbed: list[Completions]
) -> None:
    stall = {"kind": "stall", "for_s": 5.0, "after_tokens": 100, "engines": ["policy-0"]}
    live = start_live(umbra_session, tmp_path, tiny_model_dir, stall, config=PATIENT)
    live.publish(1)
    published_at: list[float] = []

    def publish_once_it_stalls() -> None:
        while not injected(tmp_path, "policy-0"):
            live.manager.call("stats")
        live.publish(2)
        published_at.append(time.monotonic())

    with while_generating(live, 0, publish_once_it_stalls):
        batches = live.next_batch(0)
        complete_at = time.monotonic()

    assert_whole(batches, undisturbed[0])
    assert batches[0]["metrics"]["gen_s"] > 5.0
    assert complete_at - published_at[0] > 1.0, "the sync did not wait for the stall's end"
    assert counters(live)["engines_lost"] == 0


@pytest.mark.slow
def test_requests_that_an_engine_does_not_take_are_offered_again(
    umbra_session: Session, tmp_path: Path, tiny_model_dir: Path, undisturbed: list[Completions]
) -> None:
    refusals = {"kind": "error", "call": "submit", "after_tokens": 0, "times": 3}
    live = start_live(umbra_session, tmp_path, tiny_model_dir, refusals, config=PATIENT)
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed[0])
    assert injected(tmp_path, "policy-0") == ["error (submit)"] * 3
    assert batches[0]["metrics"]["interruptions"] > 0


@pytest.mark.slow
def test_an_abort_that_fails_costs_the_link(
    umbra_session: Session, tmp_path: Path, tiny_model_dir: Path, undisturbed: list[Completions]
) -> None:
    place = {"after_tokens": 100, "engines": ["policy-0"]}
    faults = [{"kind": "drop", **place}, {"kind": "error", "call": "abort", **place}]
    live = start_live(umbra_session, tmp_path, tiny_model_dir, *faults, config=IMPATIENT)
    live.publish(1)

    batches = live.next_batch(0)

    assert_whole(batches, undisturbed[0])
    assert injected(tmp_path, "policy-0") == ["drop (batch)", "error (abort)"]
    assert counters(live)["gaps"] >= 1
    assert counters(live)["engines_lost"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "begin_update",
        "load",
        "finish_update",
        "commit_update",
        "resume",
        "pause",
        "sleep",
        "wake",
    ],
)
def test_an_engine_that_fails_on_its_way_through_a_step_is_replaced(
    umbra_session: Session,
    tmp_path: Path,
    tiny_model_dir: Path,
    undisturbed: list[Completions],
    call: str,
) -> None:
    place = {"after_tokens": 0, "engines": ["policy-0"], "incarnations": [1]}
    error = {"kind": "error", "call": call, **place}
    live = start_live(
        umbra_session, tmp_path, tiny_model_dir, error, config=PATIENT, pool_mode="hybrid"
    )

    for step in range(2):
        live.publish(step)
        assert_whole(live.next_batch(step), undisturbed[step])
        umbra_session.pool("policy").sleep(2)

    assert injected(tmp_path, "policy-0") == [f"error ({call})"]
    live.publish(2)  # a successor whose start the sleep overtook starts with the next sync
    successor = umbra_session.supervisor_call("resolve", "policy-0", 20.0, 1)
    assert successor.incarnation == 2
    assert live.processes()["policy-1"]["num_restarts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_faults_of_all_kinds_at_random_points_change_nothing(
    umbra_session: Session,
    tmp_path: Path,
    tiny_model_dir: Path,
    undisturbed: list[Completions],
    seed: int,
) -> None:
    faults = [
        {"kind": "kill", "every_tokens": 700, "incarnations": [1, 2]},
        {"kind": "repeat", "every_tokens": 90},
        {"kind": "repeat", "what": "earlier", "every_tokens": 110},
        # A turn that engines fail three times is taken for the cause: two of these at most.
        {"kind": "drop", "every_tokens": 400, "times": 1, "incarnations": [1]},
        {"kind": "stall", "for_s": 0.3, "every_tokens": 500},
        {"kind": "error", "call": "submit", "every_tokens": 300, "times": 3},
        {"kind": "error", "call": "deltas", "every_tokens": 900, "times": 1},
    ]
    live = start_live(umbra_session, tmp_path, tiny_model_dir, *faults, config=IMPATIENT, seed=seed)

    for step in range(NUM_STEPS):
        live.publish(step)
        assert_whole(live.next_batch(step), undisturbed[step])

    kinds = {line for name in ("policy-0", "policy-1") for line in injected(tmp_path, name)}
    assert len(kinds) >= 4, kinds
    assert counters(live)["repeats"] > 0
