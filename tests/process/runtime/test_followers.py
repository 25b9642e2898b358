"""Followers of an engine: they start, die and end with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from actor_specs import PROGRAMS
from pools_in_turn import wait_until
from process_runs import assert_ended

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.cluster.placement import EngineGpus, FollowerPlace
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.sync_handle import Pool
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]


class SpanningPool:
    """One engine with a follower, both on this node."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._file = folder / "task.json"
        paths = (str(Path(__file__).parent), str(PROGRAMS), os.environ.get("PYTHONPATH", ""))
        self.pool: Pool = session.create_pool(
            PoolSpec(
                name="pool",
                engine="spanning_engine:SpanningEngine",
                count=1,
                mode="standalone",
                load_weights=True,
                kwargs={"program": "follower_program"},
                env={"PYTHONPATH": os.pathsep.join(paths), "FOLLOWER_FILE": str(self._file)},
                engine_followers=((FollowerPlace(node=0, gpus=EngineGpus(own=())),),),
                restart=RestartPolicy(backoff_initial_s=0.01),
            )
        )

    @property
    def engine(self) -> Any:
        return self._session.connect(self.pool.states()[0]["ref"])

    def task(self, after_pid: int = 0) -> dict[str, Any]:
        """What the newest program was started with, once it is not that one."""
        wait_until(lambda: self._file.exists() and self._read()["pid"] != after_pid)
        return self._read()

    def _read(self) -> dict[str, Any]:
        return json.loads(self._file.read_text())

    def pid_of(self, name: str) -> int:
        return next(
            a["pid"] for a in self._session.supervisor_call("list_actors") if a["name"] == name
        )

    def restart_asked(self, name: str) -> None:
        self._session.restart(name)

    def restart_by(self, kill: Callable[[], None]) -> None:
        """Waits until the engine has been killed and serves again."""
        (before,) = self.pool.states()
        kill()
        wait_until(lambda: self.pool.states()[0]["incarnation"] > before["incarnation"])
        wait_until(lambda: self.pool.states()[0]["state"] == "SERVING")
        assert self.pool.states()[0]["incarnation"] == before["incarnation"] + 1


@pytest.fixture
def spanning(umbra_session_factory: SessionFactory, tmp_path: Path) -> Generator[SpanningPool]:
    session = umbra_session_factory(tcp_host="127.0.0.1")
    spanning = SpanningPool(session, tmp_path)
    yield spanning
    pids = [spanning.task()["pid"], spanning.pid_of("pool-0.1"), spanning.pid_of("pool-0")]
    umbra_session_factory.close()
    assert_ended(pids)


def test_a_follower_runs_the_program_with_the_task_and_its_address(spanning: SpanningPool) -> None:
    task = spanning.task()

    assert task["options"] == {"leader": "127.0.0.1"}
    assert task["variables"] == {"TASK": "follow"}
    assert task["address"] == "127.0.0.1"
    assert Path(task["folder"]).is_dir()
    assert [state["engine"] for state in spanning.pool.states()] == ["pool-0"]


def test_an_engine_dies_with_its_followers_program_and_both_start_again(
    spanning: SpanningPool,
) -> None:
    program, leading = spanning.task()["pid"], spanning.pid_of("pool-0")

    spanning.restart_by(lambda: os.kill(program, signal.SIGKILL))

    assert_ended([program, leading])
    spanning.task(after_pid=program)


def test_an_engine_dies_with_its_follower_and_both_start_again(spanning: SpanningPool) -> None:
    program, follower = spanning.task()["pid"], spanning.pid_of("pool-0.1")

    spanning.restart_by(lambda: os.kill(follower, signal.SIGKILL))

    assert_ended([program, follower])
    spanning.task(after_pid=program)


def test_a_program_ends_with_its_engine_and_the_follower_waits_for_the_next(
    spanning: SpanningPool,
) -> None:
    program, follower = spanning.task()["pid"], spanning.pid_of("pool-0.1")

    spanning.restart_by(lambda: os.kill(spanning.pid_of("pool-0"), signal.SIGKILL))

    assert_ended([program])
    spanning.task(after_pid=program)
    assert spanning.pid_of("pool-0.1") == follower


def test_an_engine_is_restarted_with_its_follower_which_is_not_restarted_alone(
    spanning: SpanningPool,
) -> None:
    program = spanning.task()["pid"]

    with pytest.raises(ConfigError, match=r"pool-0\.1 is a part of engine pool-0: restart pool-0"):
        spanning.restart_asked("pool-0.1")
    spanning.restart_by(lambda: spanning.restart_asked("pool-0"))

    assert_ended([program])
    spanning.task(after_pid=program)


def test_an_image_reaches_every_follower_byte_for_byte(
    spanning: SpanningPool, tmp_path: Path
) -> None:
    source = tmp_path / "image"
    for size in (40 << 20, 5):  # in three parts, and in one
        source.write_bytes(os.urandom(size))

        first, path = spanning.engine.call("send_image", str(source), size)

        assert first == str(source)
        assert Path(path).read_bytes() == source.read_bytes()
    spanning.engine.call("close_images")
    assert not Path(path).exists()
