"""Stop signals while the processes of a session start leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from run_traces import RunTraces

from umbra.runtime.cluster.guardian_process import GuardianProcess, start_guardian
from umbra.runtime.cluster.socket_dir import SocketDir
from umbra.runtime.errors import UmbraError
from umbra.runtime.process.descendants import child_pids
from umbra.runtime.process.signal_handling import delayed_stops

pytestmark = pytest.mark.process

PROGRAMS = Path(__file__).parent.parent / "programs"
NUM_STORMS = 25
START_S = 1.5
"""An idle machine takes half of it from the start of the owner to a serving actor."""
GONE_WITHIN_S = 60.0


@contextlib.contextmanager
def signalled_at_birth(number: signal.Signals) -> Generator[None]:
    """Sends a signal to the next child of this process as soon as there is one."""
    before, is_over = set(child_pids(os.getpid())), threading.Event()

    def send() -> None:
        while not is_over.is_set():
            for pid in set(child_pids(os.getpid())) - before:
                os.kill(pid, number)
                return

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def start(socket_dir: SocketDir, keys: Path, log_path: Path) -> GuardianProcess:
    owner_pidfd = os.pidfd_open(os.getpid())
    try:
        return start_guardian(
            [sys.executable, str(PROGRAMS / "small_supervisor.py"), "deaf"],
            config=b"{}",
            socket_dir=socket_dir,
            log_path=log_path,
            grace_s=0.5,
            owner_pidfd=owner_pidfd,
            keys_to_remove=str(keys),
        )
    finally:
        os.close(owner_pidfd)


def test_a_guardian_that_is_stopped_at_birth_removes_what_it_was_given(
    tmp_path: Path, socket_root: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    socket_dir = SocketDir.create("job", "node", socket_root)

    with signalled_at_birth(signal.SIGTERM):
        started = start(socket_dir, keys, tmp_path / "supervisor.log")

    with started:
        assert started.stop(GONE_WITHIN_S) is not None
    assert not socket_dir.path.exists()
    assert not keys.exists()


def test_a_guardian_that_is_killed_at_birth_leaves_the_removal_to_its_starter(
    tmp_path: Path, socket_root: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    socket_dir = SocketDir.create("job", "node", socket_root)

    with (
        signalled_at_birth(signal.SIGKILL),
        pytest.raises(UmbraError, match="was not started by its guardian"),
    ):
        start(socket_dir, keys, tmp_path / "supervisor.log")

    assert not socket_dir.path.exists()
    assert keys.exists()  # they are the caller's until the guardian is there


def test_a_stop_takes_effect_after_what_must_not_be_lost() -> None:
    made: list[str] = []

    def make() -> None:
        with delayed_stops():
            signal.raise_signal(signal.SIGINT)
            made.append("a folder")

    with pytest.raises(KeyboardInterrupt):
        make()

    assert made == ["a folder"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_a_storm_of_stop_signals_at_any_moment_of_a_start_leaves_nothing(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    keys = tmp_path / ".config" / "umbra" / "jobs"
    for num in range(NUM_STORMS):
        with RunTraces() as traces:
            variables = {"HOME": str(tmp_path), "UMBRA_HOST_ADDRESS": "127.0.0.1"}
            owner = subprocess.Popen(
                [sys.executable, str(PROGRAMS / "owner.py"), str(tmp_path / "run")],
                env={**os.environ, **traces.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with owner:
                time.sleep(START_S * rng.random())
                for pid in traces.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                owner.wait(GONE_WITHIN_S)
            assert traces.find(GONE_WITHIN_S) == [], f"storm {num} of seed {seed}"
            assert list(keys.glob("*")) == [], f"storm {num} of seed {seed}"
