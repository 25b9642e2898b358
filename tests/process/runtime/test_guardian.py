"""The guardian ends everything, whichever single process is killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbra.runtime.cluster.guardian_process import GuardianProcess, start_guardian
from umbra.runtime.cluster.socket_dir import SocketDir, is_in_use
from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.process import guardian
from umbra.runtime.process.process_end import ExitStatus

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).parent.parent / "programs" / "small_supervisor.py"
DEADLINE_S = 60.0


class Job:
    """A guarded supervisor with a family, owned by a sleeping process, watched by pidfds."""

    def __init__(self, folder: Path, root: Path, mode: str, grace_s: float) -> None:
        self.folder, self.root, self.mode, self.grace_s = folder, root, mode, grace_s
        self.owner = subprocess.Popen([sys.executable, "-ISc", "import signal; signal.pause()"])
        self._owner_pidfd = os.pidfd_open(self.owner.pid)
        self.socket_dir = SocketDir.create("job", "node", root)
        self.guardian = self._start()
        self.pids: dict[str, int] = {}
        self._pidfds: dict[str, int] = {}

    def _start(self) -> GuardianProcess:
        return start_guardian(
            [sys.executable, str(PROGRAM), self.mode],
            config=json.dumps({"socket_dir": str(self.socket_dir.path)}).encode(),
            socket_dir=self.socket_dir,
            log_path=self.log_path,
            grace_s=self.grace_s,
            owner_pidfd=self._owner_pidfd,
        )

    @property
    def log_path(self) -> Path:
        return self.folder / "logs" / "supervisor.log"

    def wait_ready(self) -> None:
        self.pids = self.guardian.wait_ready(DEADLINE_S)
        self._pidfds = {name: os.pidfd_open(pid) for name, pid in self.pids.items()}

    def wait_all_ended(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        for name, pidfd in self._pidfds.items():
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            assert poller.poll(left_ms), f"{name} ({self.pids[name]}) still runs"

    def close(self) -> None:
        self.owner.kill()
        self.owner.wait(DEADLINE_S)
        if self.guardian.wait(DEADLINE_S) is None:
            os.kill(self.guardian.pid, signal.SIGKILL)
            self.guardian.wait(DEADLINE_S)
        self.guardian.close()
        for pidfd in (self._owner_pidfd, *self._pidfds.values()):
            os.close(pidfd)


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path, because one of pytest's may be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="umbra-") as folder:
        yield Path(folder) / "root"


@pytest.fixture
def job(tmp_path: Path, root: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    mode, grace_s = getattr(request, "param", ("polite", DEADLINE_S))
    started = Job(tmp_path, root, mode, grace_s)
    try:
        yield started
    finally:
        started.close()


def test_owner_death_stops_the_supervisor_then_everything(job: Job) -> None:
    job.wait_ready()

    job.owner.kill()

    assert job.guardian.wait(DEADLINE_S) == ExitStatus(0)
    job.wait_all_ended()
    assert not job.socket_dir.path.exists()
    assert "the owner has ended" in job.log_path.read_text()


@pytest.mark.parametrize("job", [("deaf", 0.2)], indirect=True)
def test_a_supervisor_that_ignores_the_request_is_killed_after_its_grace(job: Job) -> None:
    job.wait_ready()

    job.owner.kill()

    assert job.guardian.wait(DEADLINE_S) == ExitStatus(128 + signal.SIGKILL)
    job.wait_all_ended()
    assert not job.socket_dir.path.exists()


def test_supervisor_death_ends_everything_at_once(job: Job) -> None:
    job.wait_ready()

    os.kill(job.pids["supervisor"], signal.SIGKILL)

    assert job.guardian.wait(DEADLINE_S) == ExitStatus(128 + signal.SIGKILL)
    job.wait_all_ended()
    assert not job.socket_dir.path.exists()


def test_guardian_death_makes_the_supervisor_end_everything(job: Job) -> None:
    job.wait_ready()

    os.kill(job.guardian.pid, signal.SIGKILL)

    assert job.guardian.wait(DEADLINE_S) == ExitStatus(-signal.SIGKILL)
    job.wait_all_ended()
    assert not job.socket_dir.path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guardian_stops_the_supervisor(job: Job, number: int) -> None:
    job.wait_ready()

    os.kill(job.guardian.pid, number)

    assert job.guardian.wait(DEADLINE_S) == ExitStatus(0)
    job.wait_all_ended()
    assert f"got {signal.Signals(number).name}" in job.log_path.read_text()


@pytest.mark.parametrize("job", [("broken", 1.0)], indirect=True)
def test_a_supervisor_that_fails_at_start_is_reported_with_its_log(job: Job) -> None:
    with pytest.raises(UmbraError, match=r"ended before it was ready(.|\n)*no such pool: x"):
        job.wait_ready()

    assert job.guardian.wait(DEADLINE_S) == ExitStatus(1)
    assert not job.socket_dir.path.exists()


def test_the_socket_directory_is_in_use_while_the_job_lives(job: Job) -> None:
    job.wait_ready()

    assert is_in_use(job.socket_dir.path)
    assert job.socket_dir.lock_fd == -1
    with pytest.raises(ConfigError, match="still running"):
        SocketDir.create("job", "node", job.root)


def test_the_guardian_is_small_and_keeps_no_secret(job: Job) -> None:
    job.wait_ready()

    status = Path(f"/proc/{job.guardian.pid}/statm").read_text().split()
    open_files = [os.readlink(f"/proc/{job.guardian.pid}/fd/{fd}") for fd in (0, 1, 2)]

    assert int(status[1]) * os.sysconf("SC_PAGE_SIZE") < 20e6
    assert open_files[0] == "/dev/null"
    assert open_files[1] == open_files[2] == str(job.folder / "logs" / "supervisor.log")


def test_an_owner_that_ended_before_the_start_ends_it(tmp_path: Path, root: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-ISc", "pass"])
    owner_pidfd = os.pidfd_open(owner.pid)
    owner.wait(DEADLINE_S)
    socket_dir = SocketDir.create("job", "node", root)
    log_path = tmp_path / "supervisor.log"

    started = start_guardian(
        [sys.executable, str(PROGRAM), "polite"],
        config=json.dumps({"socket_dir": str(socket_dir.path)}).encode(),
        socket_dir=socket_dir,
        log_path=log_path,
        grace_s=1.0,
        owner_pidfd=owner_pidfd,
    )

    with started:
        os.close(owner_pidfd)
        assert started.wait(DEADLINE_S) is not None
        assert "the owner has ended" in log_path.read_text()
    assert not socket_dir.path.exists()


def test_a_program_that_does_not_exist_is_reported(tmp_path: Path, root: Path) -> None:
    socket_dir = SocketDir.create("job", "node", root)
    owner_pidfd = os.pidfd_open(os.getpid())
    started = start_guardian(
        ["/does/not/exist"],
        config=b"",
        socket_dir=socket_dir,
        log_path=tmp_path / "supervisor.log",
        grace_s=1.0,
        owner_pidfd=owner_pidfd,
    )
    os.close(owner_pidfd)
    with started:
        with pytest.raises(UmbraError, match="No such file or directory: '/does/not/exist'"):
            started.wait_ready(DEADLINE_S)
        assert started.wait(DEADLINE_S) == ExitStatus(127)
    assert not socket_dir.path.exists()


def test_a_directory_is_removed_without_following_links(tmp_path: Path) -> None:
    doomed, kept = tmp_path / "doomed", tmp_path / "kept"
    (doomed / "inner").mkdir(parents=True)
    (doomed / "inner" / "file").touch()
    kept.mkdir()
    (kept / "file").touch()
    (doomed / "link").symlink_to(kept)
    (doomed / "dangling").symlink_to(tmp_path / "nowhere")

    guardian.remove_dir(str(doomed))

    assert not doomed.exists()
    assert (kept / "file").exists()
