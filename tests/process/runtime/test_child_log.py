"""The log of children: one over all incarnations, its tail, and the first error in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from child_processes import *  # noqa: F403 - the fixtures
from child_processes import SLEEP, Run, python

from umbra.runtime.errors import ConfigError
from umbra.runtime.process.child_process import ChildLog, ChildProcess

pytestmark = pytest.mark.process


def test_the_log_is_kept_over_incarnations_and_the_tail_is_of_the_last(
    run: Run, tmp_path: Path
) -> None:
    log_path = tmp_path / "logs" / "x.log"

    async def body() -> None:
        for incarnation in (1, 2):
            code = f"print('out {incarnation}', flush=True); raise SystemExit('err {incarnation}')"
            async with ChildProcess.spawn(
                f"x#{incarnation}", python(code), log_path=log_path
            ) as child:
                await child.wait()
        assert child.log_tail() == "out 2\nerr 2"
        assert child.log_tail(1) == "err 2"
        assert child.describe_end() == (
            f"x#2 (pid {child.pid}) exited with status 1\nlast output:\nout 2\nerr 2"
        )

    run(body())
    lines = log_path.read_text().splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("====")] == [
        "==== x#1",
        "==== x#2",
    ]
    assert "err 1" in lines


def test_a_tail_reads_a_bounded_part_of_a_long_log(tmp_path: Path) -> None:
    log = ChildLog.begin(tmp_path / "x.log", "x")
    with log.open_for_child() as file:
        file.write(b"\xff" * (1 << 20))
        file.write(b"\nlast line \xe2\x82")

    assert log.tail(1) == "last line \ufffd"
    assert len(log.tail(100)) < 65 * 1024


WORKER = "(Worker pid=7) ERROR 11-22 01:37:48 [multiproc_executor.py:953] "
SEVERAL_TRACEBACKS = f"""\
Exception: of no traceback
{WORKER}Traceback (most recent call last):
{WORKER}  File "loader.py", line 1, in load
{WORKER}    weight_loader(param)
{WORKER}  File "embedding.py", line 515, in weight_loader
{WORKER}    assert weight.shape[0] == self.vocab_size
{WORKER}           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{WORKER}AssertionError

Traceback (most recent call last):
  File "core.py", line 3, in main
    raise RuntimeError("initialization failed; see the root cause above")
RuntimeError: initialization failed; see the root cause above
"""
AFTER_OTHER_WORDS = """\
[2026-11-22 01:37:48 TP0] Load weight begin. avail mem=0.1 GB
[2026-11-22 01:37:48 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 4933, in run_scheduler_process
    scheduler = Scheduler(
                ^^^^^^^^^^
  File "pool.py", line 7, in size
    raise RuntimeError("Not enough memory.")
RuntimeError: Not enough memory.

Traceback (most recent call last):
  File "core.py", line 3, in main
RuntimeError: Rank 0 scheduler died during initialization
"""


def test_an_error_whose_traceback_follows_other_text_is_found(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    log = ChildLog.begin(path, "a life")

    path.write_text(path.read_text() + AFTER_OTHER_WORDS)

    assert log.first_error().splitlines()[-1] == "RuntimeError: Not enough memory."
    assert "pool.py" in log.first_error()


def test_the_first_error_in_a_log_is_found_with_its_location(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    path.write_text("Traceback (most recent call last):\nValueError: of an earlier life\n")
    log = ChildLog.begin(path, "a life")

    assert log.first_error() == ""

    with path.open("a") as file:
        file.write(SEVERAL_TRACEBACKS)
    assert log.first_error().splitlines() == [
        '  File "embedding.py", line 515, in weight_loader',
        "    assert weight.shape[0] == self.vocab_size",
        "AssertionError",
    ]


def test_a_log_that_cannot_be_written_is_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def body() -> None:
        with pytest.raises(ConfigError, match="set another run directory"):
            ChildProcess.spawn("x", SLEEP, log_path=tmp_path / "file" / "x.log")
        with pytest.raises(
            ConfigError, match=r"the disk is full .*: free some space, or set anoth"
        ):
            ChildProcess.spawn("x", SLEEP, log_path=Path("/dev/full"))

    run(body())
