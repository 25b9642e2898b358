"""Updates of a pool in waves: who is in which, and that every engine gets the version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_world import LocalSupervisor, ThreadEngine, empty_like, in_threads, local_pool, raw_bytes
from torch import Tensor

from umbra.runtime.engine_api.lifecycle import EngineLifecycle, EngineStarted, EngineState
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.weights.sync_calls import SyncBegin, SyncEnd, SyncGrant, SyncReport
from umbra.runtime.weights.sync_coordinator import SyncSettings
from umbra.runtime.weights.update_waves import able_engines, choose_wave, remaining
from umbra.runtime.weights.weight_publisher import WeightPublisher

SOURCES = {"a": torch.randn(1000), "b": torch.randn(7, 5)}
TWO_WAVES = SyncSettings(bucket_nbytes=512, require_engine=False, update_waves=2)


class Seeing(ThreadEngine):
    """Notes how the others are when its own weights are overwritten and when they are committed."""

    def __init__(self, name: str, others: list[Seeing]) -> None:
        super().__init__(name, empty_like(SOURCES))
        self.others = others
        self.saw: list[str] = []
        self.saw_at_commit: list[str] = []
        self.is_reaped_at_once = True

    async def load(self, version: int, timeout_s: float) -> dict[str, Any]:
        self.saw.append(self._look())
        return await super().load(version, timeout_s)

    async def commit_update(self, version: int, timeout_s: float) -> None:
        self.saw_at_commit.append(self._look())
        await super().commit_update(version, timeout_s)

    def _look(self) -> str:
        return " ".join(str(each.lifecycle) for each in self.others if each is not self)

    def kill(self, reason: str) -> None:
        if self.is_reaped_at_once:
            super().kill(reason)
        self.killed = reason

    def restart(self) -> None:
        self.incarnation += 1
        self.lifecycle = EngineLifecycle().apply(EngineStarted())


class Interrupted(Exception):
    """Raised by a signal in a rank."""


class Between(LocalSupervisor):
    """Does something between the waves: after each sync has been reported."""

    def __init__(self, plain: LocalSupervisor, act: Callable[[], None]) -> None:
        super().__init__(plain._loop, plain.coordinator)  # pyright: ignore[reportPrivateUsage]
        self._act = act

    def sync_end(self, call: SyncEnd) -> SyncReport:
        report = super().sync_end(call)
        self._act()
        return report


def make_engines(count: int) -> list[Seeing]:
    engines: list[Seeing] = []
    engines += [Seeing(f"e{idx}", engines) for idx in range(count)]
    return engines


def publish(
    supervisor: LocalSupervisor, version: int, rank: int = 0, world_size: int = 1
) -> SyncReport:
    tensors: dict[str, Tensor] = {name: tensor + version for name, tensor in SOURCES.items()}
    with closing(WeightPublisher(supervisor, rank, world_size, tensors)) as publisher:
        return publisher.publish("pool", version, 20.0)


def states(engines: list[Seeing]) -> list[str]:
    return [str(engine.lifecycle) for engine in engines]


def test_engines_serve_the_older_version_until_their_wave_comes() -> None:
    engines = make_engines(2)
    with local_pool(engines, TWO_WAVES) as supervisor:
        publish(supervisor, 1)
        report = publish(supervisor, 2)

    assert [engine.saw[1] for engine in engines] == ["SERVING(1)", "SERVING(2)"]
    assert states(engines) == ["SERVING(2)", "SERVING(2)"]
    assert set(report.engines) == {"e0", "e1"}
    assert not report.remaining
    for engine in engines:
        assert raw_bytes(engine.destinations["a"]) == raw_bytes(SOURCES["a"] + 2)


def test_all_ranks_publish_every_wave() -> None:
    engines = make_engines(3)
    three = replace(TWO_WAVES, update_waves=3)
    with local_pool(engines, three) as supervisor:
        for version in (1, 2):
            reports = in_threads(
                lambda version=version: publish(supervisor, version, 0, 2),
                lambda version=version: publish(supervisor, version, 1, 2),
            )

    assert reports[0] == reports[1]
    assert [engine.saw[1] for engine in engines] == [
        "SERVING(1) SERVING(1)",
        "SERVING(2) SERVING(1)",
        "SERVING(2) SERVING(2)",
    ]


def test_one_wave_is_one_sync() -> None:
    engines = make_engines(2)
    with local_pool(engines, replace(TWO_WAVES, update_waves=1)) as supervisor:
        publish(supervisor, 1)
        publish(supervisor, 2)

    assert not any("SERVING(1)" in engine.saw_at_commit[1] for engine in engines)


def test_an_engine_that_lacks_weights_is_in_the_first_wave() -> None:
    engines = make_engines(2)
    with local_pool(engines, TWO_WAVES) as supervisor:
        publish(supervisor, 1)
        engines[1].restart()
        publish(supervisor, 2)

    assert engines[1].saw[1] == "SERVING(1)"
    assert engines[0].saw[1] == "SERVING(2)"


@pytest.mark.parametrize("is_reaped_at_once", [True, False])
def test_the_update_continues_after_a_wave_whose_engines_all_died(is_reaped_at_once: bool) -> None:
    engines = make_engines(2)
    with local_pool(engines, TWO_WAVES) as supervisor:
        publish(supervisor, 1)
        engines[0].fail_at = "prepare_update"
        engines[0].is_reaped_at_once = is_reaped_at_once
        report = publish(supervisor, 2)

    assert engines[0].log.count("prepare_update") == 2, "killed: in no later wave"
    assert list(report.engines) == ["e1"]
    assert list(report.failed) == ["e0"]
    assert states(engines)[1] == "SERVING(2)"


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_engine_may_die_before_its_wave(comes_back: bool) -> None:
    engines = make_engines(2)
    with local_pool(engines, TWO_WAVES) as plain:
        publish(plain, 1)

        def die() -> None:
            if engines[1].killed is None:
                engines[1].kill("between the waves")
                if comes_back:
                    engines[1].restart()

        report = publish(Between(plain, die), 2)

    assert states(engines) == ["SERVING(2)", "SERVING(2)" if comes_back else "DEAD"]
    assert not report.failed
    assert len(engines[1].saw) == (2 if comes_back else 1)


def test_what_an_interrupted_update_left_behind_comes_first_in_the_next() -> None:
    engines = make_engines(3)
    three = replace(TWO_WAVES, update_waves=3)

    def interrupt() -> None:
        raise Interrupted

    with local_pool(engines, three) as plain:
        publish(plain, 1)
        with pytest.raises(Interrupted):
            publish(Between(plain, interrupt), 2)
        after = states(engines)
        publish(plain, 3)

    assert after == ["SERVING(2)", "SERVING(1)", "SERVING(1)"]
    assert [engine.saw[-1] for engine in engines] == [
        "SERVING(3) SERVING(3)",
        "SERVING(2) SERVING(1)",
        "SERVING(2) SERVING(3)",
    ]


def test_publishing_again_ends_what_was_interrupted() -> None:
    engines = make_engines(2)

    def interrupt() -> None:
        raise Interrupted

    with local_pool(engines, TWO_WAVES) as plain:
        publish(plain, 1)
        with pytest.raises(Interrupted):
            publish(Between(plain, interrupt), 2)
        publish(plain, 2)

    assert states(engines) == ["SERVING(2)", "SERVING(2)"]
    assert len(engines[0].saw) == 2, "it had the version already"


def test_every_wave_of_a_version_has_checksums_or_none() -> None:
    engines = make_engines(2)
    have_checksums: list[bool] = []

    class Recorder(Between):
        def sync_begin(self, call: SyncBegin) -> SyncGrant:
            grant = super().sync_begin(call)
            have_checksums.append(grant.has_checksums)
            return grant

    with local_pool(engines, replace(TWO_WAVES, verify_every=2)) as plain:
        for version in range(1, 5):
            publish(Recorder(plain, lambda: None), version)
        engines[1].restart()
        publish(Recorder(plain, lambda: None), 4)

    assert have_checksums == [True, False, False, True, True, False, False, True]


engine_states = st.sampled_from(
    [
        EngineLifecycle(state=EngineState.SERVING, version=1),
        EngineLifecycle(state=EngineState.SERVING, version=2),
        EngineLifecycle(state=EngineState.PENDING_WEIGHTS),
        EngineLifecycle(state=EngineState.PAUSED, version=2),
        EngineLifecycle(state=EngineState.DEAD),
    ]
)


@given(st.lists(engine_states, min_size=1, max_size=9), st.integers(1, 9))
def test_waves_end_reach_all_and_spare_as_many_as_they_can(
    lifecycles: list[EngineLifecycle], num_waves: int
) -> None:
    engines = [ThreadEngine(f"e{idx}", {}) for idx in range(len(lifecycles))]
    for engine, lifecycle in zip(engines, lifecycles, strict=True):
        engine.lifecycle = lifecycle
    updated: list[str] = []
    for wave in range(num_waves):
        lacking = [e for e in able_engines(engines) if e.lifecycle.version != 3]
        chosen = choose_wave(lacking, num_waves - wave)
        serving = [e for e in engines if e.lifecycle.state == EngineState.SERVING]
        stopped = [e for e in chosen if e in serving]
        assert len(stopped) <= -(-len(lacking) // (num_waves - wave))
        if any(e not in stopped for e in chosen) and num_waves - wave > 1 and len(serving) > 1:
            assert len(stopped) < len(serving)
        for engine in chosen:
            engine.lifecycle = EngineLifecycle(state=EngineState.SERVING, version=3)
        updated += [engine.name for engine in chosen]
        if not remaining(able_engines(engines), 3):
            break

    able = [f"e{idx}" for idx, one in enumerate(lifecycles) if one.state != EngineState.DEAD]
    assert sorted(updated) == able


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "hybrid"}, "set update_waves to 1, or mode to 'standalone'"),
        ({"update_waves": 3}, "update_waves 3 is not possible with 2 engines: use 1 to 2"),
        ({"update_waves": 0}, "update_waves 0 is not possible"),
    ],
)
def test_a_pool_that_cannot_be_updated_in_waves_is_an_error(
    changes: dict[str, Any], problem: str
) -> None:
    settings: dict[str, Any] = {"mode": "standalone", "update_waves": 2} | changes
    with pytest.raises(ConfigError, match=problem):
        PoolSpec(name="pool", engine="x:X", count=2, **settings)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "hybrid"}, "set mode to 'standalone'"),
        ({"engine": "sglang"}, "engine 'sglang' reads weights when it is paused"),
        ({"transport": "memfd"}, "set transport to 'auto'"),
    ],
)
def test_a_pool_that_cannot_stage_updates_is_an_error(
    changes: dict[str, Any], problem: str
) -> None:
    settings: dict[str, Any] = {"mode": "standalone", "engine": "vllm", "staged_updates": True}
    PoolSpec(name="pool", count=2, **settings)
    with pytest.raises(ConfigError, match=f"pool 'pool': staged_updates .*{problem}"):
        PoolSpec(name="pool", count=2, **(settings | changes))
