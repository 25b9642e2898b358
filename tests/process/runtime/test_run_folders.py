"""Folders that cannot be used: each gives an error that names it and the remedy, at once."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from actor_specs import actor

from umbra.runtime.errors import ActorDied, ConfigError, JobFailed
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process


@pytest.fixture
def small_disk(mount_disk: Callable[[str], Path]) -> Path:
    return mount_disk("size=1m")


def fill(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def test_a_read_only_run_directory_is_named(
    umbra_session_factory: SessionFactory, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=20)

    with pytest.raises(
        ConfigError, match=r"disk/run.*read-only file system.*another run directory"
    ):
        umbra_session_factory(run_dir=small_disk / "run")


def test_a_full_disk_is_named_at_the_start(
    umbra_session_factory: SessionFactory, small_disk: Path
) -> None:
    fill(small_disk)

    with pytest.raises(
        ConfigError, match=r"disk/run.*disk is full \(0 bytes free on .*/disk\): free"
    ):
        umbra_session_factory(run_dir=small_disk / "run")


@pytest.mark.slow
def test_a_disk_that_fills_up_later_spares_what_runs(
    umbra_session_factory: SessionFactory, small_disk: Path
) -> None:
    session = umbra_session_factory(run_dir=small_disk / "run")
    echo = session.spawn(actor("Echo"))
    fill(small_disk)

    with pytest.raises(
        ActorDied, match=r"cannot write log.*the disk is full \(.*: free some space"
    ):
        session.spawn(actor("Echo"))

    assert echo.call("echo", 1) == 1
    with pytest.raises(Exception, match="No space left on device"):
        echo.call("write", "x" * 100_000)
    assert echo.call("echo", 2) == 2


def test_a_run_directory_that_is_a_file_is_named(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    path = tmp_path / "taken"
    path.touch()

    with pytest.raises(ConfigError, match=r"taken/logs.*a part of that path is a file"):
        umbra_session_factory(run_dir=path)


@pytest.mark.slow
def test_a_job_whose_socket_directory_is_removed_is_stopped_with_the_reason(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory()
    echo = session.spawn(actor("Echo"))
    echo.call("who", timeout_s=30.0)
    shutil.rmtree(session.socket_dir)

    log = session.log_dir / "supervisor.log"
    deadline = time.monotonic() + 60.0
    while f"{session.socket_dir} with this job's sockets was removed" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)

    with pytest.raises(JobFailed, match="stopped by SIGTERM"):
        echo.call("sleep", 30.0, timeout_s=60.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("UMBRA_LOG_LEVEL", "loud", "UMBRA_LOG_LEVEL is 'LOUD'; allowed: .*DEBUG"),
        ("RANK", "0", "LOCAL_RANK is None, not a number: start with torchrun"),
        ("RANK", "first", "RANK is 'first', not a number"),
    ],
)
def test_a_malformed_variable_is_named(
    umbra_session_factory: SessionFactory, name: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        umbra_session_factory(environ={name: value})
