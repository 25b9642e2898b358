"""Everything that a run leaves behind is found, and nothing that others leave."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_traces import RunTraces

from umbra.runtime.cluster.socket_dir import SocketDir

pytestmark = pytest.mark.process

LEAVES_SOCKETS = """
from umbra.runtime.cluster.environment import socket_root
from umbra.runtime.cluster.socket_dir import SocketDir
SocketDir.create("job", "node", socket_root()).release()
"""
LEAVES_A_DAEMON = """
import os
begins, begun = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sleep", ["sleep", "60"])
os.close(begun)
os.read(begins, 1)  # the other end closes as sleep begins
"""
LEAVES_SHARED_MEMORY = "import sys; open(sys.argv[1], 'w').close()"
LEAVES_NOTHING = "pass"
ENDING_S = 5.0


def run(traces: RunTraces, program: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **traces.environment},
        timeout=30.0,
        check=True,
    )


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    path = Path(f"/dev/shm/umbra-traces-{secrets.token_hex(8)}")
    yield path
    path.unlink(missing_ok=True)


def test_a_run_that_cleans_up_leaves_no_traces() -> None:
    with RunTraces() as traces:
        run(traces, LEAVES_NOTHING)

        assert traces.find(ENDING_S) == []


def test_a_socket_folder_is_found_and_then_removed() -> None:
    with RunTraces() as traces:
        folder = Path(traces.environment["UMBRA_SOCKET_ROOT"], "job-node")
        run(traces, LEAVES_SOCKETS)

        assert traces.find(0.0) == [f"socket folder {folder}"]

    assert not folder.parent.exists()


def test_a_daemon_is_found_and_then_killed() -> None:
    with RunTraces() as traces:
        run(traces, LEAVES_A_DAEMON)
        (pid,) = traces.pids()
        ends = os.pidfd_open(pid)

        assert traces.find(0.0) == [f"process {pid}: sleep 60"]

    with open(ends):
        assert os.waitid(os.P_PIDFD, ends, os.WEXITED) is not None


def test_a_name_of_shared_memory_is_found(shared_memory: Path) -> None:
    with RunTraces() as traces:
        run(traces, LEAVES_SHARED_MEMORY, str(shared_memory))

        assert traces.find(0.0) == [f"shared memory {shared_memory}"]


def test_what_others_have_is_none_of_its_traces(shared_memory: Path) -> None:
    with (
        # Not below pytest's folder: a socket's path may have 100 bytes.
        tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as folder,
        RunTraces() as traces,
        SocketDir.create("job", "node", Path(folder) / "sockets"),
        subprocess.Popen(["/bin/sleep", "60"]) as stranger,
        shared_memory.open("w"),
    ):
        assert traces.find(0.0) == []
        stranger.kill()
