"""Rolling updates with real processes: generation continues, and versions are right."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live_rollouts import LiveRollouts, merged, while_generating
from rollout_configs import rollout_config
from test_live_rollouts import expected_completions

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.collective import SessionSync
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session import Session
from umbra.runtime.weights.sync_calls import SyncEnd, SyncFilled, SyncReport
from umbra.runtime.weights.weight_publisher import WeightPublisher

pytestmark = [pytest.mark.process, pytest.mark.slow]

BENCH = Path(__file__).parents[2] / "bench"
ECHO = {"vocab_size": 64, "tick_ms": 10.0, "tokens_per_s": 100.0}
WEIGHTS = {"w": torch.zeros(192 << 20)}  # long enough on their way


class Between(SessionSync):
    """Does something once, after the first wave."""

    def __init__(self, session: Session, act: Callable[[], None]) -> None:
        super().__init__(session)
        self._to_do = [act]

    def sync_end(self, call: SyncEnd) -> SyncReport:
        report = super().sync_end(call)
        if self._to_do:
            self._to_do.pop()()
        return report


def publish(session: Session, version: int, act: Callable[[], None] = lambda: None) -> None:
    weights = {"w": torch.zeros(10)}
    WeightPublisher(Between(session, act), 0, 1, weights).publish("policy", version, 20.0)


def states(session: Session) -> list[tuple[str, int]]:
    return [(row["state"], row["version"]) for row in session.pool("policy").states()]


def silences(session: Session, update_waves: int) -> list[tuple[float, float]]:
    """Seconds without a token of any engine, and of the transfer, of each of three updates."""
    name = f"policy{update_waves}"
    session.create_pool(
        PoolSpec(
            name=name,
            engine="umbra.engines.echo.echo_engine:EchoEngine",
            count=2,
            mode="standalone",
            update_waves=update_waves,
            kwargs=ECHO,
        )
    )
    config = rollout_config(pool=name, max_new_tokens=128, max_context_len=160)
    manager = session.spawn(
        ActorSpec(
            name=f"manager{update_waves}",
            target="gap_manager:GapManager",
            sys_path=(str(BENCH),),
            kwargs={"config": config, "prompt_len": 32},
        )
    )
    publisher = WeightPublisher(SessionSync(session), 0, 1, WEIGHTS)
    publisher.publish(name, 0, 20.0)
    manager.call("keep_in_flight", 16)
    manager.call("first_tokens", 0, 2, timeout_s=20.0)
    found: list[tuple[float, float]] = []
    for version in range(1, 4):
        began = time.monotonic()
        report = publisher.publish(name, version, 20.0)
        came_at = manager.call("first_tokens", version, 2, timeout_s=20.0)
        silence_s = manager.call("longest_silence", began, max(came_at))
        found.append((silence_s, report.transfer_s))
    session.stop(f"manager{update_waves}")
    publisher.close()
    return found


def test_in_waves_some_engine_always_makes_tokens(umbra_session: Session) -> None:
    at_once = silences(umbra_session, 1)
    in_waves = silences(umbra_session, 2)

    print(f"silence and transfer: at once {at_once}, in two waves {in_waves}")
    # The best of each: anything may hold up a process of a busy machine.
    assert min(in_waves)[0] < min(at_once)[0] / 2


@pytest.mark.parametrize("on_update", ["abort", "keep", "drain"])
def test_a_rolling_update_in_mid_generation_only_changes_versions(
    umbra_session: Session, tmp_path: Path, on_update: str
) -> None:
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        engine={"tokens_per_s": 60.0},
        pool={"update_waves": 2, "on_update": on_update},
    )
    live.publish(1)

    between: list[list[tuple[str, int]]] = []
    with while_generating(
        live, 100, lambda: publish(umbra_session, 2, lambda: between.append(states(umbra_session)))
    ):
        samples = merged(live.next_batch(0))

    assert sorted(between[0]) == [("SERVING", 1), ("SERVING", 2)]
    assert states(umbra_session) == [("SERVING", 2), ("SERVING", 2)]
    assert {name: s["completion"] for name, s in samples.items()} == expected_completions(0)
    assert all(sorted(sample["versions"]) == sample["versions"] for sample in samples.values())
    mixed = [sample for sample in samples.values() if len(set(sample["versions"])) > 1]
    assert not mixed if on_update == "drain" else mixed


class FailsDuringDrain(SessionSync):
    """A rank that fails when an engine has begun to drain."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._session = session

    def sync_filled(self, call: SyncFilled) -> None:
        deadline = time.monotonic() + 10.0
        while states(self._session) == [("SERVING", 1)]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise RuntimeError("the rank fails")


def test_an_engine_that_drains_goes_on_when_the_sync_is_aborted(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(
        umbra_session,
        tmp_path,
        engine={"tokens_per_s": 15.0},
        num_engines=1,
        pool={"on_update": "drain"},
    )
    live.publish(1)

    def publish_in_vain() -> None:
        publisher = WeightPublisher(FailsDuringDrain(umbra_session), 0, 1, {"w": torch.zeros(10)})
        with pytest.raises(RuntimeError, match="the rank fails"):
            publisher.publish("policy", 2, 20.0)
        begun_at = time.monotonic()
        while states(umbra_session) != [("SERVING", 1)]:
            assert time.monotonic() < begun_at + 1.0

    with while_generating(live, 100, publish_in_vain):
        samples = merged(live.next_batch(0))

    assert {name: s["completion"] for name, s in samples.items()} == expected_completions(0)
    assert {version for s in samples.values() for version in s["versions"]} == {1}
    assert live.processes()["policy-0"]["incarnation"] == 1


def test_an_engine_that_is_killed_between_the_waves_catches_up(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = LiveRollouts(
        umbra_session, tmp_path, engine={"tokens_per_s": 60.0}, pool={"update_waves": 2}
    )
    live.publish(1)

    def update() -> None:
        publish(umbra_session, 2, lambda: live.signal("policy-1", signal.SIGKILL))
        live.version = 2

    with while_generating(live, 100, update):
        samples = merged(live.next_batch(0))
    umbra_session.actor("policy-1")  # it is up again
    more = merged(live.next_batch(1))

    assert {name: s["completion"] for name, s in samples.items()} == expected_completions(0)
    assert {name: s["completion"] for name, s in more.items()} == expected_completions(1)
    assert all(set(sample["versions"]) == {2} for sample in more.values())
    assert states(umbra_session) == [("SERVING", 2), ("SERVING", 2)]
    assert live.processes()["policy-1"]["incarnation"] == 2


def test_what_an_interrupted_update_left_behind_is_updated_by_the_next(
    umbra_session: Session, tmp_path: Path
) -> None:
    settings = {"max_staleness": 1}
    live = LiveRollouts(umbra_session, tmp_path, pool={"update_waves": 2}, config=settings)

    def interrupt() -> None:
        raise KeyboardInterrupt

    live.announce(1, 0)
    live.publish(1)
    live.next_batch(0)
    live.announce(2, 1)
    with pytest.raises(KeyboardInterrupt):
        publish(umbra_session, 2, interrupt)
    left = states(umbra_session)
    live.announce(3, 1)
    live.publish(3)
    samples = merged(live.next_batch(1))

    assert sorted(left) == [("SERVING", 1), ("SERVING", 2)]
    assert states(umbra_session) == [("SERVING", 3), ("SERVING", 3)]
    assert live.num_syncs_served == 0
    assert {name: s["completion"] for name, s in samples.items()} == expected_completions(1)
