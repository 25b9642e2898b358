"""Pools in turn, with real engines: never two awake at once, whatever dies or interferes."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pool_log import assert_never_both_awake
from pools_in_turn import Shared, judge_spec, spec, wait_until

from umbra.runtime.errors import ConfigError, DeadlineExceeded, EngineError, RemoteError, UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session.session import Session
from umbra.runtime.settings import to_wire
from umbra.runtime.testing.factories import SessionFactory

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_two_judges_interrupt_a_busy_policy_again_and_again_though_nothing_else_happens(
    umbra_session_factory: SessionFactory,
) -> None:
    """While one has its turn the other waits for too long: it is next as soon as that ends."""
    names = ("a", "b")
    shared = Shared(umbra_session_factory, judges=names, max_wait_s=0.5, max_turn_s=0.3)
    for name in names:
        shared.has_work(name, True)

    for _ in range(3):
        for name in ("policy", *names):
            shared.wait_for_turn(name)

    shared.check_never_both_awake()


def test_the_trainer_takes_the_memory_from_a_judge_and_keeps_it(
    umbra_session_factory: SessionFactory,
) -> None:
    shared = Shared(umbra_session_factory)
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")
    policy = shared.session.pool("policy")

    policy.sleep(1)

    assert (shared.state("policy"), shared.state("judge")) == ("ASLEEP", "ASLEEP")
    time.sleep(0.3)  # nothing is to happen
    assert (shared.state("policy"), shared.state("judge")) == ("ASLEEP", "ASLEEP")
    shared.has_work("policy", True)
    policy.wake(["weights", "kv_cache"])
    policy.resume()
    shared.wait_for("SERVING", "ASLEEP")
    shared.has_work("policy", False)
    shared.wait_for("ASLEEP", "SERVING")
    shared.check_never_both_awake()


@pytest.mark.parametrize("policy", [{"mode": "hybrid"}, {"count": 2}], ids=["hybrid", "two"])
def test_weights_that_arrive_in_the_judges_turn_end_it(
    umbra_session_factory: SessionFactory, policy: dict[str, Any]
) -> None:
    shared = Shared(umbra_session_factory, policy={"load_weights": False, **policy})
    shared.publish(1)
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")

    shared.publish(2)
    assert set(shared.versions()) == {2}
    shared.wait_for("ASLEEP", "SERVING")
    assert set(shared.versions()) == {2}  # which a turn does not cost
    shared.has_work("policy", True)
    shared.has_work("judge", False)
    shared.wait_for("SERVING", "ASLEEP")
    shared.check_never_both_awake()


def test_a_judge_sleeps_while_the_trainer_trains_and_wakes_with_the_next_weights(
    umbra_session_factory: SessionFactory,
) -> None:
    shared = Shared(umbra_session_factory, policy={"mode": "hybrid", "load_weights": False})
    shared.publish(1)
    shared.session.pool("policy").sleep(2)
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    time.sleep(0.4)  # nothing is to happen
    assert (shared.state("policy"), shared.state("judge")) == ("ASLEEP", "ASLEEP")

    shared.publish(2)

    shared.wait_for("ASLEEP", "SERVING")
    assert shared.versions() == [2]
    shared.check_never_both_awake()


def test_a_judge_that_dies_in_its_turn_comes_back_in_its_turn(
    umbra_session_factory: SessionFactory,
) -> None:
    shared = Shared(umbra_session_factory)
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")

    shared.kill("judge-0")

    wait_until(lambda: shared.incarnation("judge-0") == 2)
    shared.wait_for("ASLEEP", "SERVING")
    shared.check_never_both_awake()


def slow(**kwargs: Any) -> dict[str, Any]:
    """A pool's settings."""
    return {
        "engine": "slow_engine:SlowEngine",
        "kwargs": kwargs,
        "env": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    }


def slow_starts(folder: Path, start_s: float) -> dict[str, Any]:
    """A judge's; `folder`/marker is there once it starts again."""
    return slow(start_s=start_s, marker=str(folder / "marker"))


def abort_at(session: Session, method: str, *args: object, after_s: float) -> None:
    """A call to the supervisor whose caller goes before it is answered."""
    with pytest.raises(DeadlineExceeded):
        session.supervisor_call(method, *args, timeout_s=after_s)


def test_an_engine_wakes_though_who_asked_it_to_is_gone(umbra_session: Session) -> None:
    umbra_session.create_pool(spec("policy", **slow(wake_s=1.0)))
    pool = umbra_session.pool("policy")
    pool.sleep(1)

    abort_at(umbra_session, "pool_wake", "policy", ["weights", "kv_cache"], 30.0, after_s=0.3)

    assert pool.states()[0]["state"] == "WAKING"
    pool.resume(timeout_s=30)  # which waits for that
    assert pool.states()[0]["state"] == "SERVING"


def test_a_policy_gets_the_memory_back_though_who_took_it_for_it_is_gone(
    umbra_session_factory: SessionFactory,
) -> None:
    shared = Shared(umbra_session_factory, policy=slow(wake_s=1.0))
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")

    abort_at(shared.session, "pool_resume", "policy", 30.0, after_s=0.5)

    shared.has_work("policy", True)
    shared.has_work("judge", False)
    shared.wait_for("SERVING", "ASLEEP")
    shared.check_never_both_awake()


def test_a_turn_does_not_end_before_a_start_that_is_under_way(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    shared = Shared(umbra_session_factory, **slow_starts(tmp_path, start_s=1.0))
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")
    shared.kill("judge-0")
    wait_until((tmp_path / "marker").exists)

    shared.has_work("judge", False)
    shared.has_work("policy", True)

    shared.wait_for("SERVING", "ASLEEP")
    assert shared.incarnation("judge-0") == 2
    shared.check_never_both_awake()


def test_the_trainer_does_not_wait_for_a_start(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    shared = Shared(umbra_session_factory, **slow_starts(tmp_path, start_s=60.0))
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")
    shared.kill("judge-0")
    wait_until((tmp_path / "marker").exists)
    shared.has_work("policy", True)  # so the turn would end, but for the start

    began_at = time.monotonic()
    shared.session.pool("policy").sleep(1)

    assert time.monotonic() - began_at < 20.0
    assert (shared.state("policy"), shared.state("judge")) == ("ASLEEP", "DEAD")
    notes = umbra_session_factory.notes
    wait_until(lambda: any("its start kept another pool waiting" in note for note in notes))
    shared.check_never_both_awake()


@pytest.mark.parametrize(
    ("victim", "other", "states"),
    [("judge", "policy", ("ASLEEP", "SERVING")), ("policy", "judge", ("SERVING", "ASLEEP"))],
    ids=["judge", "policy"],
)
def test_an_engine_that_dies_asleep_is_started_only_in_its_turn(
    umbra_session_factory: SessionFactory, victim: str, other: str, states: tuple[str, str]
) -> None:
    shared = Shared(umbra_session_factory)
    shared.has_work(victim, False)
    shared.has_work(other, True)
    shared.wait_for(*reversed(states))

    shared.kill(f"{victim}-0")
    wait_until(lambda: shared.state(victim) == "DEAD")
    time.sleep(0.5)  # nothing is to happen
    assert shared.incarnation(f"{victim}-0") == 1
    shared.has_work(other, False)
    shared.has_work(victim, True)

    shared.wait_for(*states)
    assert shared.incarnation(f"{victim}-0") == 2
    shared.check_never_both_awake()


def test_a_judge_that_does_not_free_its_memory_is_killed(
    umbra_session_factory: SessionFactory,
) -> None:
    """It is stopped, so it is killed as hung, and the policy continues after that."""
    shared = Shared(umbra_session_factory, hung_limit_s=1.0)
    shared.has_work("policy", False)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")

    os.kill(shared.pid("judge-0"), signal.SIGSTOP)
    shared.has_work("judge", False)
    shared.has_work("policy", True)

    shared.wait_for("SERVING", "DEAD")
    shared.check_never_both_awake()


def test_a_judge_that_joins_later_takes_the_memory_to_start(umbra_session: Session) -> None:
    umbra_session.create_pool(spec("policy"))

    umbra_session.create_pool(judge_spec())

    wait_until(lambda: umbra_session.pool("policy").states()[0]["state"] == "SERVING")
    assert umbra_session.pool("judge").states()[0]["state"] == "ASLEEP"


def test_a_judge_that_cannot_start_leaves_the_memory_to_the_policy(
    umbra_session: Session,
) -> None:
    with pytest.raises(UmbraError, match="vocab_size=0"):
        umbra_session.create_pool(judge_spec(kwargs={"vocab_size": 0}))

    umbra_session.create_pool(spec("policy"))

    assert umbra_session.pool("policy").states()[0]["state"] == "SERVING"


def test_a_judge_half_of_which_cannot_start_is_gone_before_the_policy_wakes(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory(environ={"UMBRA_LOG_LEVEL": "DEBUG"})
    session.create_pool(spec("policy"))

    with pytest.raises(UmbraError, match="this one cannot start"):
        session.create_pool(judge_spec(count=2, **slow(broken="judge-1", end_s=1.0)))

    wait_until(lambda: session.pool("policy").states()[0]["state"] == "SERVING")
    assert_never_both_awake(umbra_session_factory.run_dirs[0] / "logs" / "supervisor.log")


def test_what_does_not_fit_a_shared_pool_is_refused(umbra_session: Session) -> None:
    with pytest.raises(ConfigError, match="go together"):
        spec("judge", mode="colocated")
    with pytest.raises(ConfigError, match="set load_weights"):
        PoolSpec(name="j", engine="m:E", count=1, mode="colocated", shares_with="policy")
    umbra_session.create_pool(judge_spec())
    umbra_session.create_pool(spec("other"))

    with pytest.raises(UmbraError, match="umbra wakes it and puts it to sleep"):
        umbra_session.pool("judge").sleep(1)
    with pytest.raises(EngineError, match="sleep at level 1"):
        umbra_session.pool("other").sleep(2)


def test_what_no_engine_can_do_is_refused_and_kills_none(umbra_session: Session) -> None:
    umbra_session.create_pool(spec("policy"))
    pool = umbra_session.pool("policy")

    with pytest.raises(RemoteError, match="unknown tags"):
        pool.wake(["optimizer"])
    with pytest.raises(RemoteError, match="sleep level must be 1 or 2"):
        pool.sleep(3)
    with pytest.raises(RemoteError, match="pause mode must be abort, keep or drain"):
        pool.pause("gently")

    assert (pool.states()[0]["state"], pool.states()[0]["incarnation"]) == ("SERVING", 1)


def test_a_pool_whose_creator_died_meanwhile_is_created_for_the_next(
    umbra_session: Session,
) -> None:
    settings = spec("policy", **slow(end_s=1.0))

    abort_at(umbra_session, "create_pool", to_wire(settings), after_s=0.1)
    pool = umbra_session.create_pool(settings)

    assert pool.states()[0]["state"] == "SERVING"


def test_a_sleep_that_was_refused_keeps_nobody_from_a_turn(
    umbra_session_factory: SessionFactory,
) -> None:
    shared = Shared(umbra_session_factory)
    policy = shared.session.pool("policy")
    shared.has_work("policy", False)

    with pytest.raises(EngineError, match="sleep at level 1"):
        policy.sleep(2)
    shared.has_work("judge", True)
    shared.wait_for("ASLEEP", "SERVING")
    policy.sleep(1)
    with pytest.raises(RemoteError, match="unknown tags"):
        policy.wake(["optimizer"])

    time.sleep(0.3)  # nothing is to happen
    assert shared.state("judge") == "ASLEEP"


def test_work_for_a_judge_that_waits_to_be_started_is_noted(umbra_session: Session) -> None:
    names = ("judge", "second")
    sharing = {"mode": "colocated", "shares_with": "policy", "max_wait_s": 0.1, "max_turn_s": 0.3}
    with ThreadPoolExecutor(len(names)) as threads:
        starts = [
            threads.submit(umbra_session.create_pool, spec(name, **sharing), others_s=20.0)
            for name in names
        ]
        wait_until(lambda: bool(umbra_session.supervisor_call("list_actors")))  # of the first
        for name in names:
            umbra_session.supervisor_call("pool_has_work", name, True)
        for start in starts:
            start.result()

    for name in names:
        wait_until(lambda name=name: umbra_session.pool(name).states()[0]["state"] == "SERVING")
