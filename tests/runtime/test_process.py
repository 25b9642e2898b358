"""Children of a supervisor: started, watched, and ended with all they fork."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from umbra.runtime.errors import ActorError, ConfigError
from umbra.runtime.process import descendants, prctl
from umbra.runtime.process.child import ChildProcess, living_pids, resident_nbytes
from umbra.runtime.process.child_log import ChildLog
from umbra.runtime.process.exit_status import ExitStatus
from umbra.runtime.process.pid_watch import PidWatch

pytestmark = pytest.mark.process

PROGRAMS = Path(__file__).parent.parent / "programs"
DEADLINE_S = 20.0
SLEEP = [sys.executable, "-ISc", "import signal; signal.pause()"]

Run = Callable[[Coroutine[Any, Any, None]], None]


def python(code: str) -> list[str]:
    return [sys.executable, "-ISc", code]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine within the deadline, on the standard loop and on the supervisor's."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_within_deadline(body: Coroutine[Any, Any, None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await body

        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(limited())
        assert not living_pids()

    return run_within_deadline


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end): what a child reports on."""
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def read_pids(read_fd: int) -> dict[str, int]:
    """The report of family.py."""
    assert wait_readable(read_fd)
    pids: dict[str, int] = json.loads(os.read(read_fd, 4096))
    return pids


def wait_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(DEADLINE_S * 1000))


def wait_ended(pids: dict[str, int]) -> None:
    """Every one of `pids` ends within the deadline."""
    for name, pid in pids.items():
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert wait_readable(pidfd), f"{name} ({pid}) still runs"
        finally:
            os.close(pidfd)


def family(report_fd: int, *members: str) -> list[str]:
    return [sys.executable, str(PROGRAMS / "family.py"), str(report_fd), *members]


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
def test_the_exit_status_is_told(
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


def test_a_daemon_stays_below_its_living_ancestor(run: Run, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe

    async def body() -> None:
        argv = family(write_fd, "daemon")
        async with ChildProcess.spawn("x", argv, pass_fds=[write_fd]) as child:
            daemon = read_pids(read_fd)["daemon"]
            stat = descendants.process_stat(daemon)
            assert stat is not None
            assert stat.parent_pid == child.pid
            assert os.getsid(daemon) != child.pid
        wait_ended({"daemon": daemon})

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
    """As a bit mask, from the text of /proc/PID/status."""
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
                assert (await child.wait()).is_success
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
            assert (await child.wait()).is_success
        assert child.log_tail(1) == hashlib.sha256(payload).hexdigest()

    run(body())


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


def test_an_error_whose_traceback_follows_other_words_is_found(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    log = ChildLog.begin(path, "a life")

    path.write_text(path.read_text() + AFTER_OTHER_WORDS)

    assert log.first_error().splitlines()[-1] == "RuntimeError: Not enough memory."
    assert "pool.py" in log.first_error()


def test_the_first_error_in_a_log_is_found_with_its_place(tmp_path: Path) -> None:
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


def test_a_program_that_cannot_be_executed_is_told(run: Run, tmp_path: Path) -> None:
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


def test_a_log_that_cannot_be_written_is_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def body() -> None:
        with pytest.raises(ConfigError, match="set another run directory"):
            ChildProcess.spawn("x", SLEEP, log_path=tmp_path / "file" / "x.log")
        with pytest.raises(ConfigError, match="No space left on device"):
            ChildProcess.spawn("x", SLEEP, log_path=Path("/dev/full"))

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
            assert 64 << 20 < resident_nbytes(child.pid) < 128 << 20
        assert resident_nbytes(child.pid) == 0

    run(body())


def test_orphans_of_a_dead_child_are_ended_and_the_living_left_alone() -> None:
    argv = [sys.executable, str(PROGRAMS / "orphan_keeper.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert wait_readable(keeper.stdout.fileno())
        answer = json.loads(keeper.stdout.readline())
        living = answer["families"]["living"]

        assert answer["adopted"] >= 3
        assert answer["survivors"] == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in answer["families"]["dead"].values())
        states = {name: Path(f"/proc/{pid}/stat").read_text() for name, pid in living.items()}
        assert not any(" Z " in state for state in states.values())

        keeper.stdin.close()
        assert wait_readable(keeper.stdout.fileno())
        assert json.loads(keeper.stdout.readline()) == {
            "left": [],
            "status": "ended with unknown status",
        }
        assert not any(Path(f"/proc/{pid}").exists() for pid in living.values())
        assert keeper.wait(DEADLINE_S) == 0


MAKES_NAMES = """
import os, signal
from multiprocessing import shared_memory
from umbra.runtime.process import descendants, prctl
prctl.become_subreaper()
read_fd, write_fd = os.pipe()
if os.fork() == 0:
    memory = shared_memory.SharedMemory(create=True, size=100)
    os.write(write_fd, memory.name.encode())
    signal.pause()
print(os.read(read_fd, 100).decode(), flush=True)
assert descendants.kill_all_descendants(20.0) == []
"""


@pytest.mark.slow
def test_names_of_shared_memory_go_with_all_descendants() -> None:
    argv = [sys.executable, "-c", MAKES_NAMES]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        name = maker.communicate(timeout=DEADLINE_S)[0].strip()

    assert name.startswith("psm_")
    assert maker.returncode == 0
    assert not Path("/dev/shm", name).exists()


def test_children_are_found_with_and_without_the_kernels_listing(
    stranger: subprocess.Popen[bytes],
) -> None:
    found = descendants.child_pids(os.getpid())

    assert stranger.pid in found
    assert sorted(descendants.scan_child_pids(os.getpid())) == sorted(found)


def test_pythons_resource_tracker_is_no_working_child(stranger: subprocess.Popen[bytes]) -> None:
    code = "print('up', flush=True);from multiprocessing.resource_tracker import main;main(0)"
    tracker = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(tracker, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"  # its command line can be read
        found = descendants.working_child_pids(os.getpid())
        assert process.pid in descendants.child_pids(os.getpid())

    assert stranger.pid in found
    assert process.pid not in found


@pytest.mark.process
def test_nobody_waits_for_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    started = time.monotonic()

    descendants.wait_for_exits([process.pid, os.getpid()], 20.0)

    assert time.monotonic() - started < 5.0


def test_descendants_end_at_the_children_to_spare(run: Run, pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe

    async def body() -> None:
        argv = family(write_fd, "child", "daemon")
        async with ChildProcess.spawn("x", argv, pass_fds=[write_fd]) as child:
            pids = read_pids(read_fd)
            below = {found.pid for found in descendants.living_descendants(os.getpid())}
            assert below >= set(pids.values())
            spared = descendants.living_descendants(os.getpid(), spared=[child.pid])
            assert not {found.pid for found in spared} & set(pids.values())
            members = descendants.living_descendants(child.pid)
            assert {found.pid for found in members} == {pids["child"], pids["daemon"]}

    run(body())


def test_a_strange_process_name_does_not_confuse_the_parser(tmp_path: Path) -> None:
    program = tmp_path / ") Z 1 (("
    program.symlink_to("/bin/sleep")

    with subprocess.Popen([program, "60"]) as process:
        stat = descendants.process_stat(process.pid)
        process.kill()

    assert stat is not None
    assert (stat.parent_pid, stat.has_ended) == (os.getpid(), False)
    assert descendants.process_stat(process.pid) is None


def test_the_layer_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import umbra.runtime.lifecycle, umbra.runtime.restart\n"
        "import umbra.runtime.process.launch_guardian, umbra.runtime.process.orphans\n"
        "print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )

    assert done.stdout.strip() == "[]"


def test_a_process_that_gets_no_orphans_refuses_to_end_them() -> None:
    code = "from umbra.runtime.process.orphans import kill_orphans; kill_orphans()"

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 1
    assert (
        "RuntimeError: only a subreaper gets orphans: call prctl.become_subreaper()" in done.stderr
    )


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ChildProcess knows nothing of."""
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def test_a_watch_tells_the_end_of_any_process(run: Run, stranger: subprocess.Popen[bytes]) -> None:
    async def body() -> None:
        ended = asyncio.Event()
        with PidWatch(stranger.pid, ended.set):
            stranger.kill()
            await ended.wait()

    run(body())
    stranger.wait(DEADLINE_S)


def test_a_watch_of_a_process_that_is_gone_tells_at_once(
    run: Run, stranger: subprocess.Popen[bytes]
) -> None:
    stranger.kill()
    stranger.wait(DEADLINE_S)

    async def body() -> None:
        ended = asyncio.Event()
        with PidWatch(stranger.pid, ended.set):
            await ended.wait()

    run(body())


def test_a_closed_watch_is_silent(run: Run, stranger: subprocess.Popen[bytes]) -> None:
    async def body() -> None:
        told: list[str] = []
        last = asyncio.Event()
        with PidWatch(stranger.pid, lambda: told.append("closed")):
            pass
        with PidWatch(stranger.pid, last.set):
            stranger.kill()
            await last.wait()
        assert told == []

    run(body())


def test_a_parent_other_than_expected_counts_as_ended(run: Run) -> None:
    async def body() -> None:
        ended = asyncio.Event()
        with PidWatch.of_parent(os.getpid(), ended.set):
            await ended.wait()
        with PidWatch.of_parent(os.getppid(), ended.clear):
            assert ended.is_set()

    run(body())
