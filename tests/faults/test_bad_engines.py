"""Engines that cannot be started, crash in a loop or take too much memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from whole_runs import BAD_INPUT_LIMIT_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.patient]

EMBEDDED = ("pool.engine=embedded", "pool.engine_args={}")


def test_every_rank_reports_that_the_engine_cannot_be_imported(folder: Path) -> None:
    with start_run(folder, "pool.engine=nope.module:Engine") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "policy-0#1 failed to start: ConfigError: cannot import 'nope.module'",
        "No module named 'nope'. Install it",
    )


@pytest.mark.parametrize(
    ("num_ranks", "settings", "words"),
    [
        (
            0,
            ["pool.engine_args={speed=1}"],
            ["unexpected keyword argument 'speed'", "it takes vocab"],
        ),
        (
            2,
            ["pool.engine=embedded", 'pool.engine_args={dtype="float16"}'],
            ["dtype 'float16' is not supported; allowed: float32, bfloat16, float64"],
        ),
        (
            0,
            ["pool.engine=faulty", 'pool.engine_args={inner="echo", faults=[{kind="explode"}]}'],
            ["ConfigError: faults[0].kind is 'explode'; allowed: kill, stop, stall"],
        ),
        (
            2,
            ["pool.engine=failing_engines:DiesAtStart"],
            ["exited with status 5", "CUDA driver version is insufficient"],
        ),
    ],
)
def test_an_engine_that_cannot_start_is_named_with_its_cause(
    folder: Path, num_ranks: int, settings: list[str], words: list[str]
) -> None:
    with start_run(folder, *settings, num_ranks=num_ranks) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("policy-0#1 failed to start", *words)


def test_an_engine_that_dies_in_every_sync_fails_the_run_on_every_rank(folder: Path) -> None:
    engine = "pool.engine=failing_engines:DiesInSync"

    with start_run(folder, engine, "pool.max_restarts=1") as run:
        ended = run.wait()

    ended.check_failed(
        "policy-0 failed: policy-0#2",
        "exited with status 6",
        "after 1 restarts within 600 s (allowed: 1)",
    )
    # The engine's end is reported as such, not as an error of the sync.
    note = r"policy-0#1 \(pid \d+\) exited with status 6; restarting it in [\d.]+ s$"
    assert re.search(note, ended.output, re.MULTILINE), ended.output


def test_an_engine_that_dies_of_every_request_fails_the_run_on_every_rank(folder: Path) -> None:
    engine = "pool.engine=failing_engines:DiesAtWork"

    with start_run(folder, engine, "pool.max_restarts=1") as run:
        ended = run.wait()

    ended.check_failed("policy-0#2", "exited with status 7", "after 1 restarts")
    assert "8 trajectories keep their 0 tokens" in ended.output


def test_an_engine_above_its_memory_limit_is_named_with_the_limit(folder: Path) -> None:
    limit = ("pool.memory_limit_mib=64", "pool.max_restarts=0")

    with start_run(folder, *EMBEDDED, *limit) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed("MiB resident, above its memory limit of 64 MiB: raise")
