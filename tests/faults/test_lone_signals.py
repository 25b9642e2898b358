"""A stop that reaches only one rank, or only the supervisor, ends the run like a signal to all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from held_places import HeldPlaces
from run_assets import write_rows
from whole_runs import END_LIMIT_S, Run, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow]

REACH_LIMIT_S = 90.0


@contextmanager
def held_run(folder: Path, *settings: str) -> Generator[tuple[Run, HeldPlaces]]:
    """A run that evaluates before the first step and after every second one."""
    places = HeldPlaces(folder / "held")
    held_out = write_rows(folder / "held_out.jsonl", [{"prompt": "held out 1="}] * 2)
    always = [
        "train.steps=1000",
        "train.eval_every=2",
        f"data.eval={held_out}",
        "reward.function=held_places:held_reward",
        "pool.engine=held_places:HeldEngine",
    ]
    with start_run(
        folder,
        *always,
        *settings,
        program="held_places",
        environ={"HELD_IN": str(folder / "held")},
    ) as run:
        yield run, places


def hold(run: Run, places: HeldPlaces, place: str) -> None:
    """Waits until a process has reached this point, and holds it there."""
    places.hold(place)
    run.wait_for(place, lambda: places.is_reached(place) or None, REACH_LIMIT_S)


def stop_in(run: Run, places: HeldPlaces, place: str, number: signal.Signals, rank: int) -> None:
    """Sends one rank a signal while the run is held at this point."""
    hold(run, places, place)
    os.kill(run.pid_of(f"rank {rank}"), number)


def check_stopped(run: Run, *sent: signal.Signals) -> None:
    """The run has stopped in order, by one of the signals that were sent."""
    ended = run.wait(END_LIMIT_S)
    num_steps = run.num_steps()
    named = [it for it in sent if f"stopped by {it.name} after {num_steps} steps" in ended.output]
    assert len(named) == 1, ended.output
    (number,) = named
    assert [ended.error_of(rank) for rank in (0, 1)] == ["", ""]
    complete = [path.parent.name for path in run.run_dir.glob("checkpoints/*/COMPLETE")]
    assert complete == [f"step-{num_steps:06d}"], ended.output
    # torchrun prints the exit code of each rank that did not end with 0.
    assert f"exitcode  : {128 + number}" in ended.output, ended.output


@pytest.mark.parametrize(("place", "rank"), [("sync", 0), ("step", 1)])
def test_a_signal_to_one_rank_lets_the_ranks_end_what_they_do_together(
    folder: Path, place: str, rank: int
) -> None:
    with held_run(folder) as (run, places):
        run.wait_for_step(1)
        stop_in(run, places, place, signal.SIGINT, rank)
        places.release(place)

        check_stopped(run, signal.SIGINT)


def test_a_signal_to_one_rank_ends_the_sync_that_all_serve_while_they_wait(folder: Path) -> None:
    """The rank aborts that sync, which fails it on the other rank."""
    with held_run(folder) as (run, places):
        run.wait_for_step(1)
        hold(run, places, "batch")
        places.hold("sync")
        os.kill(run.pid_of("policy-0"), signal.SIGKILL)
        run.wait_for("sync", lambda: places.is_reached("sync") or None, REACH_LIMIT_S)
        os.kill(run.pid_of("rank 1"), signal.SIGTERM)

        check_stopped(run, signal.SIGTERM)


def test_signals_that_follow_each_other_leave_the_ranks_what_they_need_to_stop(
    folder: Path,
) -> None:
    """systemd sends SIGTERM and then SIGHUP at once. The ranks are in a step meanwhile.

    Sent so close together, the second may be the first that a process sees.
    """
    with held_run(folder, "train.shutdown_grace_s=12") as (run, places):
        run.wait_for_step(1)
        hold(run, places, "step")
        names = ("guardian", "supervisor", "rollouts", "worker-0", "policy-0")
        pids = [run.pid_of(name) for name in names]
        for number in (signal.SIGTERM, signal.SIGHUP):
            for pid in pids:
                os.kill(pid, number)
        log = run.run_dir / "logs" / "rollouts.log"
        run.wait_for("both", lambda: "received SIGHUP" in log.read_text() or None, REACH_LIMIT_S)
        places.release("step")

        check_stopped(run, signal.SIGTERM, signal.SIGHUP)


def test_a_run_whose_sockets_are_removed_stops_before_it_needs_them(folder: Path) -> None:
    with held_run(folder) as (run, places):
        run.wait_for_step(1)
        hold(run, places, "batch")
        address = json.loads((run.run_dir / "supervisor.json").read_text())
        shutil.rmtree(address["socket_dir"])

        check_stopped(run, signal.SIGTERM)
        assert "with this job's sockets was removed" in run.output
