"""A rank is bound to torchrun's agent, and ends at once where something else is above it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from actor_specs import PROGRAMS
from rank_processes import poll
from watching import DEADLINE_S, all_end, tree

pytestmark = pytest.mark.process

PAUSE = "import signal; signal.pause()"
START = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_x/none_y/attempt_0/1/error.json",
}
TRAINER = ["-m", "umbra.trainer", "train.toml"]
BOUND_RANK = [sys.executable, str(PROGRAMS / "bound_rank.py")]
OPTIONS = ["--standalone", "--nproc-per-node", "2"]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def adopter(kind: str, folder: Path, program: Sequence[str]) -> list[str]:
    """A program that runs forever, and whose command line may look like torchrun's."""
    python, shell = sys.executable, str(shutil.which("bash"))
    match kind:
        case "the same interpreter":
            return [python, "-ISc", PAUSE]
        case "another program":
            return [str(shutil.which("sleep")), "60"]
        case "a launcher of torchrun":
            return [python, write(folder / "launch.py", PAUSE), "torchrun", *OPTIONS, *program]
        case "a shell script named torchrun":
            return [shell, write(folder / "torchrun", "read -r line"), *OPTIONS, *program]
        case _:  # torchrun of another job
            torchrun = write(folder / "torchrun", PAUSE)
            return [python, torchrun, *OPTIONS, "-m", "umbra.trainer", "other.toml"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("the same interpreter", "python"),
        ("another program", "sleep"),
        ("a launcher of torchrun", "python"),
        ("a shell script named torchrun", "bash"),
        ("torchrun of another job", "python"),
    ],
)
def test_a_rank_that_was_adopted_before_it_looked_ends_at_once(
    tmp_path: Path, kind: str, name: str
) -> None:
    job = {
        "rank": [sys.executable, "-u", *TRAINER],
        "environ": START | {"UMBRA_SOCKET_ROOT": str(tmp_path / "s")},
        "adopter": adopter(kind, tmp_path / "bin", TRAINER),
    }
    with (
        (tmp_path / "errors").open("wb") as errors,
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "adopted_rank.py"), json.dumps(job)],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as parent,
    ):
        try:
            assert parent.stdout is not None
            wait_ended(int(parent.stdout.readline()))
        finally:
            parent.kill()

    (line,) = [line for line in (tmp_path / "errors").read_text().splitlines() if "rank 1" in line]
    assert f"agent has ended: above this rank is process {parent.pid} ({name}" in line
    assert "docker run --init" in line
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "s").exists()


@contextlib.contextmanager
def launched(
    *rank: str, **environ: str
) -> Generator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A launcher that does not look like torchrun, and what its rank printed."""
    launcher = (
        "import json, os, subprocess, sys\n"
        "subprocess.run(sys.argv[2:], env={**os.environ, **json.loads(sys.argv[1])})"
    )
    with subprocess.Popen(
        [sys.executable, "-ISc", launcher, json.dumps(START | environ), *rank],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_rank_of_an_unknown_launcher_ends_with_it(is_wrapped: bool) -> None:
    """Also below a shell that outlives the launcher."""
    rank = BOUND_RANK
    if is_wrapped:
        rank = ["bash", "-c", f"{shlex.join(rank)}; exit $?"]
    with launched(*rank) as (launcher, bound):
        below = tree(launcher.pid)
        with all_end(below):
            launcher.kill()

    assert bound["agent"] == launcher.pid
    assert len(bound["lineage"]) == len(below) - 1 == 1 + is_wrapped


def test_a_launcher_that_ends_during_the_start_leaves_no_socket_folder(
    tmp_path: Path, socket_root: Path
) -> None:
    """The rank has made the folder, and hangs before it starts the guardian, who removes it."""
    log = tmp_path / "run" / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)
    rank = [sys.executable, str(PROGRAMS / "rank.py"), str(tmp_path / "run"), "leave"]
    environ = {"LOCAL_RANK": "0", "UMBRA_SOCKET_ROOT": str(socket_root)}
    with launched(*rank, **environ) as (launcher, _):
        poll(lambda: list(socket_root.glob("none_*")), 1, "a socket folder")
        with contextlib.ExitStack() as stack, all_end(tree(launcher.pid)):
            launcher.kill()
            launcher.wait(DEADLINE_S)
            # Whoever opens it for writing is blocked until somebody reads.
            stack.callback(os.close, os.open(log, os.O_RDONLY | os.O_NONBLOCK))

    assert list(socket_root.iterdir()) == []


@pytest.mark.slow
def test_torchrun_may_be_the_first_process_of_a_container(
    tmp_path: Path, socket_root: Path
) -> None:
    pytest.importorskip("torch")
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.getuid() != 0:
        unshare += ["--user", "--map-root-user"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, timeout=DEADLINE_S)
    if tried.returncode != 0:
        pytest.skip(f"no PID namespaces here: {tried.stderr.strip()}")
    rank = [str(PROGRAMS / "rank.py"), str(tmp_path / "run"), "leave"]

    done = subprocess.run(
        [*unshare, sys.executable, "-m", "torch.distributed.run", *OPTIONS, *rank],
        env={**os.environ, "UMBRA_SOCKET_ROOT": str(socket_root)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"event": "met"') == 2
    assert list(socket_root.iterdir()) == []


def wait_ended(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert poller.poll(DEADLINE_S * 1000), f"rank {pid} still runs"
    finally:
        os.close(pidfd)
