"""The real torchrun: its failures, signals, death and elastic restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from actor_specs import PROGRAMS
from rank_processes import poll, read_events
from watching import DEADLINE_S, all_end, tree

pytest.importorskip("torch")

pytestmark = [pytest.mark.process, pytest.mark.alone]


@contextlib.contextmanager
def torchrun(
    folder: Path, socket_root: Path, *scenario: str, options: tuple[str, ...] = ()
) -> Generator[tuple[subprocess.Popen[bytes], Path]]:
    """torchrun with two ranks of tests/process/programs/rank.py, and the file with their output."""
    output_path = folder / "output.jsonl"
    with output_path.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", *options),
                *(str(PROGRAMS / "rank.py"), str(folder / "run"), *scenario),
            ],
            env={**os.environ, "UMBRA_SOCKET_ROOT": str(socket_root)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, output_path
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)


def wait_for(output: Path, event: str) -> None:
    poll(lambda: read_events([output], event), 2, event)


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job_and_is_named(tmp_path: Path, socket_root: Path) -> None:
    with torchrun(tmp_path, socket_root, "raise", "1") as (process, output):
        assert process.wait(DEADLINE_S) == 1

    assert "rank 0: rank 1 failed: ValueError: loss is NaN\n" in output.read_text()
    assert list(socket_root.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGKILL],
)
def test_a_signal_to_torchrun_ends_everything_within_5_s(
    tmp_path: Path, socket_root: Path, number: int
) -> None:
    with torchrun(tmp_path, socket_root, "block") as (process, output):
        wait_for(output, "met")
        begin = time.monotonic()
        with all_end(tree(process.pid), within_s=5.0):
            process.send_signal(number)
        took_s = time.monotonic() - begin

    assert took_s < 5.0
    assert list(socket_root.iterdir()) == []


@pytest.mark.slow
def test_an_elastic_restart_starts_over_under_the_same_supervisor(
    tmp_path: Path, socket_root: Path
) -> None:
    options = ("--max-restarts", "1", "--monitor-interval", "0.1")

    with torchrun(tmp_path, socket_root, "raise-once", "1", options=options) as (process, output):
        assert process.wait(DEADLINE_S * 2) == 0

    assert {event["incarnation"] for event in read_events([output], "met").values()} == {2}
    log = (tmp_path / "run" / "logs" / "supervisor.log").read_text()
    assert log.count("==== guardian and supervisor") == 1
    assert list(socket_root.iterdir()) == []
