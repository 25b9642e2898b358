"""The lifetime of a session: what it starts, reports and leaves, and what ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from actor_specs import PROGRAMS, actor
from pools_in_turn import wait_until
from rank_processes import poll
from watching import all_end, kill, processes, supervisor_of, tree

from umbra.runtime.disk import scratch_path
from umbra.runtime.errors import ActorDied, MailboxClosed, UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process import descendants
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process

HEAVY = ["torch", "pydantic", "transformers"]


def guardian_of(session: Session) -> int:
    """The one of this process's children that got the session's directory as an argument."""
    for pid in descendants.child_pids(os.getpid()):
        if str(session.socket_dir) in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError(f"no guardian of {session.socket_dir}")


# -- what it starts and reports ------------------------------------------------------------


@pytest.mark.slow
def test_neither_session_nor_supervisor_nor_plain_actor_loads_torch(
    tmp_path: Path, socket_root: Path
) -> None:
    script = f"""
import json, os, sys
from pathlib import Path
from umbra.runtime import ActorSpec, Session, SessionConfig
with Session.from_torchrun(SessionConfig(run_dir=Path({str(tmp_path)!r}))) as session:
    echo = session.spawn(ActorSpec(name="e", target="actors:Echo", sys_path=({str(PROGRAMS)!r},)))
    from umbra.runtime.process.descendants import child_pids
    (guardian,) = child_pids(os.getpid())
    (supervisor,) = child_pids(guardian)
    print(json.dumps({{
        "session": [name for name in {[*HEAVY, "numpy"]!r} if name in sys.modules],
        "actor": echo.call("loaded_modules", {HEAVY!r}),
        "supervisor": [name for name in {[*HEAVY, "numpy"]!r}
                       if "/" + name + "/" in Path(f"/proc/{{supervisor}}/maps").read_text()],
    }}))
"""
    environment = {**os.environ, "UMBRA_SOCKET_ROOT": str(socket_root)}

    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert json.loads(done.stdout) == {"session": [], "actor": [], "supervisor": []}


def test_without_torchrun_the_process_is_rank_0_of_1(session: Session) -> None:
    assert (session.rank, session.local_rank, session.world_size) == (0, 0, 1)
    assert session.incarnation == 1


def test_what_a_node_has_chosen_is_known_to_the_others(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory(tcp_host="127.0.0.1", choices={"model.dtype": "bfloat16"})

    assert [node.choices for node in session.nodes] == [{"model.dtype": "bfloat16"}]


def test_processes_json_describes_the_processes(umbra_session_factory: SessionFactory) -> None:
    session = umbra_session_factory()
    echo = session.spawn(actor("Echo", "judge"))

    def running() -> dict[str, dict[str, object]]:
        run_dir = umbra_session_factory.run_dirs[0]
        rows = processes(run_dir) if (run_dir / "processes.json").exists() else {}
        return {name: row for name, row in rows.items() if row["state"] == "RUNNING"}

    rows = poll(running, 1, "an actor in processes.json")

    assert rows["judge"]["pid"] == echo.call("who")["pid"]
    assert rows["judge"]["incarnation"] == 1


def test_a_file_system_that_hangs_does_not_hold_the_supervisor_up(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    written = scratch_path(run_dir / "processes.json")
    os.mkfifo(written)  # whoever opens it for writing waits until somebody reads

    session = umbra_session_factory(run_dir=run_dir)
    session.spawn(actor("Echo", "judge"))

    assert session.supervisor_call("list_actors", timeout_s=60.0)
    # A blocking open could miss a writer that has closed before the reader wakes.
    with open(os.open(written, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader:
        wait_until(lambda: b'"judge"' in (reader.read() or b""))


@pytest.mark.slow
def test_two_jobs_at_once_do_not_know_each_other(umbra_session_factory: SessionFactory) -> None:
    first, second = umbra_session_factory(), umbra_session_factory()

    one = first.spawn(actor("Echo", "same-name"))
    other = second.spawn(actor("Echo", "same-name"))

    assert one.call("who")["pid"] != other.call("who")["pid"]
    assert len(first.supervisor_call("list_actors")) == 1


def test_leaving_ends_everything_at_once(umbra_session_factory: SessionFactory) -> None:
    session = umbra_session_factory(shutdown_grace_s=30.0)
    session.spawn(actor("Echo")).call("fork_family")
    started = tree(guardian_of(session))

    begin = time.monotonic()
    with all_end(started):
        umbra_session_factory.close()

    assert len(started) >= 4
    # No grace was waited out, on a machine as busy as may be.
    assert time.monotonic() - begin < 30.0
    assert not session.socket_dir.exists()


def test_calls_on_a_closed_session_are_errors(umbra_session_factory: SessionFactory) -> None:
    session = umbra_session_factory()
    echo = session.spawn(actor("Echo"))
    items = echo.stream("count", 100, credits=2)
    assert next(items) == 0
    umbra_session_factory.close()

    with pytest.raises(UmbraError):
        echo.call("echo", 1)
    with pytest.raises(UmbraError):
        session.supervisor_call("list_actors")
    with pytest.raises(MailboxClosed):
        list(items)


def test_an_interrupt_ends_a_blocked_call(session: Session, spawn: Any) -> None:
    echo, main_thread = spawn(actor("Echo")), threading.get_ident()
    # Python leaves it ignored where the starter did, as a shell does with what runs behind "&".
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_the_call() -> None:
        wait_until(lambda: echo.call("num_waiting") == 1)
        signal.pthread_kill(main_thread, signal.SIGINT)

    with ThreadPoolExecutor(1) as side:
        interrupting = side.submit(interrupt_the_call)
        with pytest.raises(KeyboardInterrupt):
            echo.call("sleep", 60.0, timeout_s=60.0)
        interrupting.result()

    signal.signal(signal.SIGINT, before)
    assert echo.call("cancelled") == 1


@pytest.mark.slow
def test_a_supervisor_that_was_stopped_does_not_blame_its_actors(
    session: Session, spawn: Any
) -> None:
    echo = spawn(actor("Echo", hung_limit_s=1.5))  # a heartbeat takes milliseconds
    supervisor = supervisor_of(guardian_of(session))

    kill(supervisor, signal.SIGSTOP)
    time.sleep(2.0)
    kill(supervisor, signal.SIGCONT)

    # Longer than the limit, so that a wrong verdict would have come.
    time.sleep(1.7)
    assert session.actor(echo.ref.name).call("who")["incarnation"] == 1


def test_a_pool_whose_engines_cannot_start_reports_the_reason_and_leaves_nothing(
    session: Session,
) -> None:
    pool = PoolSpec(name="pool", engine="umbra.engines.echo.echo_engine:NoSuchEngine", count=2)

    with pytest.raises(ActorDied, match="has no class 'NoSuchEngine'"):
        session.create_pool(pool)

    rows = [row for row in session.supervisor_call("list_actors") if row["role"] == "engine"]
    assert {row["state"] for row in rows} <= {"FAILED", "STOPPED"}


# -- who dies, and what follows ------------------------------------------------------------


@contextlib.contextmanager
def owner(
    folder: Path, socket_root: Path
) -> Generator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process with a session of its own, and what it reports."""
    environment = {**os.environ, "UMBRA_SOCKET_ROOT": str(socket_root)}
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "owner.py"), str(folder / "run")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def pids_of(report: dict[str, Any]) -> list[int]:
    return [pid for pid in report.values() if isinstance(pid, int)]


@pytest.mark.slow
def test_the_directory_of_a_dead_job_is_swept_by_the_next(
    tmp_path: Path, socket_root: Path
) -> None:
    with owner(tmp_path, socket_root) as (process, report):
        # Both at once, so that neither can clean up after the other: a power cut in small.
        for name in ("guardian", "supervisor"):
            kill(report[name], signal.SIGSTOP)
        with all_end(pids_of(report)):
            for name in ("guardian", "supervisor", "daemon", "child", "actor"):
                kill(report[name])
            process.kill()
    left = Path(report["socket_dir"])
    assert left.exists()

    with owner(tmp_path, socket_root) as (_, fresh):
        assert not left.exists()
        assert Path(fresh["socket_dir"]).exists()
    wait_until_gone(Path(fresh["socket_dir"]))


def wait_until_gone(path: Path, within_s: float = 60.0) -> None:
    """The guardian, nobody's child here, removes the directory as its last act."""
    deadline = time.monotonic() + within_s
    while path.exists():
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.02)
