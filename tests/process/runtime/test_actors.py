"""Actors under supervision: what they answer, and starts that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from actor_specs import actor
from watched_actors import Spawn
from watching import all_end

from umbra.runtime.errors import (
    ActorDied,
    ActorNotFound,
    ConfigError,
)
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process


def parent_of(pid: int) -> int:
    stat = process_stat(pid)
    assert stat is not None
    return stat.parent_pid


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


@pytest.mark.slow
def test_an_actor_answers_streams_and_stops(session: Session, spawn: Spawn) -> None:
    echo = spawn(actor("Echo", kwargs={"greeting": "hi"}))

    assert echo.call("echo", {"a": [1, None, b"x"]}) == {"a": [1, None, b"x"]}
    assert list(echo.stream("count", 40, credits=4)) == list(range(40))
    who = echo.call("who")
    assert (who["name"], who["incarnation"], who["greeting"]) == (echo.ref.name, 1, "hi")

    with all_end([who["pid"]]):
        session.stop(echo.ref.name)
    with pytest.raises(ActorNotFound, match="no actor 'actor-"):
        echo.call("echo", 1, timeout_s=30.0)
    with pytest.raises(ActorNotFound, match="no actor 'actor-"):
        session.actor(echo.ref.name, timeout_s=0.2)


def test_command_lines_identify_the_processes(shared: SessionFactory, spawn: Spawn) -> None:
    run_dir = str(shared.run_dirs[0])
    echo = spawn(actor("Echo"))

    pid = echo.call("who")["pid"]
    supervisor = parent_of(pid)

    name = echo.ref.name
    assert command_line(pid)[-2:] == [f"{name}#1", f"{run_dir}/logs/{name}.log"]
    assert "umbra.runtime.supervisor.supervisor_main" in command_line(supervisor)
    assert run_dir in command_line(supervisor)
    assert run_dir in command_line(parent_of(supervisor))


def test_environment_and_kwargs_reach_the_actor(spawn: Spawn) -> None:
    spec = actor("Echo", env={"CUDA_VISIBLE_DEVICES": "3"}, kwargs={"greeting": "moin"})

    echo = spawn(spec)

    assert echo.call("variable", "CUDA_VISIBLE_DEVICES") == "3"
    assert echo.call("variable", "UMBRA_ACTOR") == f"{echo.ref.name}#1"
    assert echo.call("who")["greeting"] == "moin"


def test_an_actor_is_no_rank(
    umbra_session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchruns = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for name, value in torchruns.items():
        monkeypatch.setenv(name, value)
    session = umbra_session_factory()

    plain = session.spawn(actor("Echo"))
    configured = session.spawn(actor("Echo", env={"MASTER_PORT": "2"}))

    assert [plain.call("variable", name) for name in torchruns] == [None, None, None]
    assert configured.call("variable", "MASTER_PORT") == "2"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:Echo", r"cannot import 'no_such_module'.*sys_path"),
        ("actors:NoSuchClass", r"has no class 'NoSuchClass'"),
        ("actors", r"'actors' must be written module:Class"),
    ],
)
def test_an_actor_that_cannot_be_imported_is_an_error(
    spawn: Spawn, target: str, message: str
) -> None:
    spec = replace(actor("Echo"), target=target)

    with pytest.raises(ActorDied, match=message):
        spawn(spec)


def test_an_actor_that_raises_at_start_brings_its_traceback(spawn: Spawn) -> None:
    with pytest.raises(ActorDied, match="ValueError: no such model") as caught:
        spawn(actor("RaisesAtStart"))

    assert "in __init__" in str(caught.value)


def test_an_actor_that_dies_at_start_reports_its_status_and_last_output(
    spawn: Spawn,
) -> None:
    with pytest.raises(ActorDied, match=r"exited with status 7(.|\n)*last words"):
        spawn(actor("ExitsAtStart"))


def test_a_failed_start_leaves_the_name_free_and_the_job_alive(spawn: Spawn) -> None:
    with pytest.raises(ActorDied):
        spawn(actor("RaisesAtStart", "again"))

    echo = spawn(actor("Echo", "again"))

    assert echo.call("echo", 1) == 1


def test_a_name_that_is_taken_is_refused(spawn: Spawn) -> None:
    spawn(actor("Echo", "taken"))

    with pytest.raises(ConfigError, match="'taken' already exists"):
        spawn(actor("Echo", "taken"))


def test_a_name_used_again_goes_on_counting_incarnations(session: Session, spawn: Spawn) -> None:
    old = spawn(actor("Echo", "counting"))
    session.stop("counting")

    new = spawn(actor("Echo", "counting"))

    assert (old.ref.incarnation, new.ref.incarnation) == (1, 2)
    assert old.ref.ipc_endpoint != new.ref.ipc_endpoint


@pytest.mark.parametrize("name", ["a/b", "..", "x" * 90, "supervisor", "a b"])
def test_a_name_that_cannot_be_a_file_is_refused(spawn: Spawn, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        spawn(actor("Echo", name))


def test_a_constructor_that_forks_does_not_delay_the_start(session: Session, spawn: Spawn) -> None:
    echo = spawn(actor("ForksAtStart", start_timeout_s=30.0))

    with all_end(echo.call("family")):
        session.stop(echo.ref.name)
