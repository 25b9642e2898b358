"""Run directories that are read-only or full, and ports that are taken."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest
from whole_runs import BAD_INPUT_LIMIT_S, END_LIMIT_S, start_run

from umbra.trainer.checkpoint.run_dir import RunLock
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.slow]

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")


@contextlib.contextmanager
def mounted(place: Path, options: str, *, leave_nbytes: int | None = None) -> Generator[None]:
    """Mounts a file system at `place`, filled up except for `leave_nbytes`."""
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=False, capture_output=True
    )
    if mount.returncode != 0:
        pytest.skip(f"cannot mount here: {mount.stderr.decode()}")
    try:
        if leave_nbytes is not None:
            free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
            (place / "junk").write_bytes(bytes(free - leave_nbytes))
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_run_directory_in_which_another_run_works_is_refused(folder: Path) -> None:
    (folder / "run").mkdir()
    with RunLock(folder / "run"), start_run(folder, "run.overwrite=true") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        f"ConfigError: run.dir: run is in use by process {os.getpid()} on {socket.gethostname()}",
        "wait for its end, or choose another directory",
        ranks=[0],
    )
    assert {path.name for path in run.run_dir.iterdir()} == {".lock"}


@needs_root
def test_a_run_directory_that_is_read_only_is_named(folder: Path) -> None:
    with mounted(folder / "run", "size=1m,ro"), start_run(folder, num_ranks=0) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed(
        "RunDirectoryError: cannot write to run: it is on a read-only file system",
        "point run.dir to a place that can be written",
    )


@needs_root
def test_every_rank_ends_when_the_disk_fills_up_in_the_middle(folder: Path) -> None:
    """Any file may be written next: the ledger, the metrics, TensorBoard's or the versions."""
    with mounted(folder / "run", "size=8m"), start_run(folder, "train.steps=100000") as run:
        run.wait_for_step(2)
        with contextlib.suppress(OSError):
            (run.run_dir / "junk").write_bytes(bytes(8 << 20))
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("the disk is full (0 bytes free on ", "free some space")


@needs_root
def test_a_disk_that_is_full_from_the_start_is_named(folder: Path) -> None:
    with mounted(folder / "run", "size=1m", leave_nbytes=0):
        with start_run(folder, num_ranks=0) as run:
            ended = run.wait(BAD_INPUT_LIMIT_S)
        left = {path.name for path in run.run_dir.iterdir()}

    assert ended.status == 1
    ended.check_failed("cannot write to run: the disk is full (0 bytes free on", "free some space")
    assert left == {"junk"}


def test_a_ledger_that_is_removed_ends_the_run_with_the_cause(folder: Path) -> None:
    with start_run(folder, "train.steps=1000", num_ranks=1) as run:
        run.wait_for_step(2)
        shutil.rmtree(run.run_dir / "ledger")
        ended = run.wait(END_LIMIT_S)

    ended.check_failed("LedgerError: cannot write", "it was removed while this run wrote to it")


def test_a_run_directory_that_is_moved_has_all_files_of_its_run(folder: Path, assets: Path) -> None:
    moved, best = folder / "moved", (f"data.eval={assets}/train.jsonl", "data.eval_limit=2")
    best += ("train.eval_every=20", "train.keep_best_by=accuracy")
    with start_run(folder, "train.steps=40", "train.export=true", *best, num_ranks=1) as run:
        run.wait_for_step(2)
        run.run_dir.rename(moved)
        ended = run.wait()

    assert ended.status == 0, ended.output
    assert read_metrics(moved / "metrics.jsonl")[-1]["step"] == 40
    for name in ("step-000040/COMPLETE", "best/COMPLETE"):
        assert (moved / "checkpoints" / name).exists(), name
    for name in ("export/config.json", "summary.json"):
        assert (moved / name).exists(), name
    with start_run(folder, "run.dir=moved", "run.resume=auto", "train.steps=41") as resumed:
        assert resumed.wait().status == 0


def test_torchrun_names_a_master_port_that_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = ("--master-addr", "127.0.0.1", "--master-port", str(port))
        with start_run(folder, torchrun=options) as run:
            ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    assert f"port: {port}" in ended.output
    assert "EADDRINUSE" in ended.output
    assert not run.run_dir.exists()
