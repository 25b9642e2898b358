"""Children of a supervisor: started, ended with all they fork, and their ends reported."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from child_processes import *  # noqa: F403 - the fixtures
from child_processes import (
    DEADLINE_S,
    PROGRAMS,
    SLEEP,
    Run,
    family,
    python,
    read_pids,
    wait_ended,
    wait_readable,
)

from umbra.runtime.errors import ActorError
from umbra.runtime.process import prctl
from umbra.runtime.process.child_process import ChildLog, ChildProcess, process_nbytes
from umbra.runtime.process.descendants import own_tree_nbytes
from umbra.runtime.process.process_end import ExitStatus

pytestmark = pytest.mark.process


@pytest.mark.parametrize("binds_itself", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", ExitStatus(0)),
        ("import sys; sys.exit(3)", ExitStatus(3)),
        ("import os; os.kill(os.getpid(), 9)", ExitStatus(-9)),
        ("import os; os.abort()", ExitStatus(-signal.SIGABRT)),
    ],
)
def test_the_exit_status_is_reported(
    run: Run, code: str, status: ExitStatus, binds_itself: bool
) -> None:
    async def body() -> None:
        async with ChildProcess.spawn("x", python(code), binds_itself=binds_itself) as child:
            assert await child.wait() == status
            assert child.status == status

    run(body())


def test_any_number_of_tasks_may_wait_and_be_cancelled(run: Run) -> None:
    async def body() -> None:
        async with ChildProcess.spawn("x", SLEEP) as child:
            async with asyncio.TaskGroup() as group:
                waiters = [group.create_task(child.wait()) for _ in range(3)]
                waiters[0].cancel()
                child.send_signal(signal.SIGKILL)
            assert [waiter.result() for waiter in waiters[1:]] == [ExitStatus(-9)] * 2
            assert waiters[0].cancelled()

    run(body())


def test_leaving_the_context_ends_the_child_also_on_an_error(run: Run) -> None:
    async def body() -> None:
        child = ChildProcess.spawn("x", SLEEP)
        with pytest.raises(RuntimeError, match="mine"):
            async with child:
                raise RuntimeError("mine")
        assert child.status == ExitStatus(-9)

    run(body())


def test_terminate_lets_a_child_end_by_itself(run: Run, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        f"os.write({write_fd}, b'up')\n"
        "while True: signal.pause()\n"
    )

    async def body() -> None:
        async with ChildProcess.spawn("x", python(code), pass_fds=[write_fd]) as child:
            assert wait_readable(read_fd)
            assert await child.terminate(grace_s=DEADLINE_S) == ExitStatus(5)
            assert await child.terminate(grace_s=DEADLINE_S) == ExitStatus(5)

    run(body())


def test_terminate_reaches_a_stopped_child(run: Run) -> None:
    async def body() -> None:
        async with ChildProcess.spawn("x", SLEEP) as child:
            child.send_signal(signal.SIGSTOP)
            assert await child.terminate(grace_s=DEADLINE_S) == ExitStatus(-signal.SIGTERM)

    run(body())


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
def test_a_deaf_child_is_killed_with_its_whole_family(
    run: Run, pipe: tuple[int, int], grace_s: float
) -> None:
    read_fd, write_fd = pipe

    async def body() -> None:
        argv = family(write_fd, "child", "daemon", "stopped", "deaf")
        async with ChildProcess.spawn("x", argv, pass_fds=[write_fd]) as child:
            pids = read_pids(read_fd)
            assert pids["self"] == child.pid
            assert await child.terminate(grace_s) == ExitStatus(-9)
        wait_ended(pids)

    run(body())


def test_a_child_dies_with_its_parent(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    argv = [sys.executable, str(PROGRAMS / "parent.py"), str(write_fd)]
    with subprocess.Popen(argv, pass_fds=[write_fd]) as parent:
        pids = read_pids(read_fd)
        assert pids["self"] != parent.pid

        parent.kill()

        wait_ended(pids)


def test_a_child_whose_parent_is_gone_before_it_binds_exits(tmp_path: Path) -> None:
    trampoline = Path(prctl.__file__).with_name("trampoline.py")
    argv = [sys.executable, "-I", "-S", str(trampoline), "1", "touch", str(tmp_path / "touched")]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    assert done.returncode == 1
    assert "parent 1 has ended" in done.stderr
    assert not (tmp_path / "touched").exists()


_IGNORED_BY_PYTHON = (1 << signal.SIGPIPE - 1) | (1 << signal.SIGXFSZ - 1)


def ignored_signals(status: str) -> int:
    """Reads a bit mask from the text of /proc/PID/status."""
    return next(int(line[7:], 16) for line in status.splitlines() if line.startswith("SigIgn:"))


def test_a_child_starts_clean(run: Run, tmp_path: Path) -> None:
    script = "grep SigIgn /proc/self/status; env; pwd; readlink /proc/self/fd/0; ls /proc/self/fd"
    env = {"PATH": os.environ["PATH"], "GIVEN": "1"}
    log_path = tmp_path / "logs" / "x.log"
    # What our own starter ignored (nohup, a shell's "&") stays so.
    allowed = ignored_signals(Path("/proc/self/status").read_text()) & ~_IGNORED_BY_PYTHON

    async def body() -> None:
        with ChildLog.begin(tmp_path / "other.log", "open here").open_for_child() as inherited:
            os.set_inheritable(inherited.fileno(), True)
            async with ChildProcess.spawn(
                "x", ["/bin/sh", "-c", script], env=env, log_path=log_path, cwd=tmp_path
            ) as child:
                assert os.getsid(child.pid) == child.pid
                assert (await child.wait()).code == 0
        lines = child.log_tail(100).splitlines()
        assert ignored_signals(child.log_tail(100)) & ~allowed == 0
        assert {"GIVEN=1", f"UMBRA_PARENT_PID={os.getpid()}", str(tmp_path), "/dev/null"} <= {
            *lines
        }
        assert not any(line.startswith("HOME=") for line in lines)
        assert lines[-4:] == ["0", "1", "2", "3"]  # The last is that of `ls` itself.

    run(body())


def test_a_payload_of_any_length_is_read_as_stdin(run: Run, tmp_path: Path) -> None:
    payload = os.urandom(1 << 20) + b"end"
    code = "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"

    async def body() -> None:
        async with ChildProcess.spawn(
            "x", python(code), stdin_payload=payload, log_path=tmp_path / "x.log"
        ) as child:
            assert (await child.wait()).code == 0
        assert child.log_tail(1) == hashlib.sha256(payload).hexdigest()

    run(body())


def test_a_program_that_cannot_be_executed_is_reported(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        missing = ["/does/not/exist"]
        with pytest.raises(ActorError, match=r"cannot start x \(/does/not/exist\).*No such file"):
            ChildProcess.spawn("x", missing, binds_itself=True)
        with pytest.raises(ActorError, match="cannot start x"):
            ChildProcess.spawn("x", SLEEP, cwd=tmp_path / "missing")
        async with ChildProcess.spawn("x", missing, log_path=tmp_path / "x.log") as child:
            assert await child.wait() == ExitStatus(127)
        assert child.log_tail() == "cannot execute /does/not/exist: No such file or directory"

    run(body())


def test_only_the_main_thread_may_spawn(run: Run) -> None:
    async def body() -> None:
        errors: list[str] = []

        def spawn() -> None:
            try:
                ChildProcess.spawn("x", SLEEP)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=spawn)
        thread.start()
        thread.join(DEADLINE_S)
        assert errors == ["x: spawn from the main thread, children die with the thread"]

    run(body())


def test_a_status_that_someone_else_reaped_is_unknown_not_success(run: Run) -> None:
    def steal(pid: int) -> None:
        os.waitpid(pid, 0)

    async def body() -> None:
        async with ChildProcess.spawn("x", python("")) as child:
            steal(child.pid)
            assert await child.wait() == ExitStatus(None)

    run(body())


def test_resident_memory_is_what_a_process_touches(run: Run, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    code = (
        f"import os, signal; data = b'x' * {64 << 20}; os.write({write_fd}, b'up'); signal.pause()"
    )

    async def body() -> None:
        async with ChildProcess.spawn("x", python(code), pass_fds=[write_fd]) as child:
            assert wait_readable(read_fd)
            assert 64 << 20 < process_nbytes(child.pid) < 128 << 20
            assert own_tree_nbytes() > process_nbytes(os.getpid()) + (48 << 20)
        assert process_nbytes(child.pid) == 0

    run(body())
