"""Syncs in which a rank or an engine fails, dies or is late while buckets travel."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from local_world import (
    IMAGE_TRANSPORTS,
    LocalSupervisor,
    ThreadEngine,
    empty_like,
    in_threads,
    local_pool,
    next_version,
    raw_bytes,
)
from torch import Tensor

from umbra.runtime.engine_api.lifecycle import EngineLifecycle, EngineState
from umbra.runtime.engine_api.pool_settings import OnUpdate
from umbra.runtime.errors import DeadlineExceeded, JobFailed, WakeError, WeightSyncError
from umbra.runtime.pools import engine_sync
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.links.link_sender import LinkListener
from umbra.runtime.weights.sync_messages import (
    Answer,
    SyncAnswer,
    SyncBegin,
    SyncCall,
    SyncFilled,
    SyncMessage,
    SyncReport,
)

SMALL = SyncSettings(bucket_nbytes=512, verify_every=1)
TCP = replace(SMALL, transport="tcp")


@pytest.fixture(params=IMAGE_TRANSPORTS)
def small(request: pytest.FixtureRequest) -> SyncSettings:
    """With each transport that has buckets."""
    return replace(SMALL, transport=request.param)


@pytest.fixture
def sources() -> dict[str, Tensor]:
    """Many buckets."""
    return {"a": torch.randn(4000), "b": torch.randn(77, 5)}


def publish(supervisor: LocalSupervisor, tensors: dict[str, Tensor], **options: Any) -> SyncReport:
    arguments: dict[str, Any] = {"rank": 0, "world_size": 1, "timeout_s": 20.0} | options
    session = supervisor.as_rank(arguments["rank"], arguments["world_size"])
    with closing(WeightPublisher(session, tensors)) as publisher:
        return publisher.publish("pool", arguments.get("version", 1), arguments["timeout_s"])


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class SecondRank:
    """Rank 1 of 2, which joins and then does nothing, on the coordinator's own loop. Receivers
    connect to it in vain until it is closed."""

    def __init__(self, supervisor: LocalSupervisor, version: int) -> None:
        self.supervisor = supervisor
        self.version = version
        self.listener = LinkListener("127.0.0.1")

    def close(self) -> None:
        self.listener.close()

    def join(self) -> None:
        call = SyncBegin(
            pool="pool",
            version=self.version,
            rank=1,
            world_size=2,
            manifest=None,
            offers={"cuda_ipc": "it has no GPU", "tcp": self.listener.endpoint},
            node_id="here",
            deadline=time.monotonic() + 20.0,
        )
        self.supervisor.sync(call)

    def die(self) -> None:
        async def lose() -> None:
            self.supervisor.coordinator.rank_lost(1, "node 1 (b)")

        self.supervisor.loop.run(lose())


@pytest.mark.slow
def test_a_rank_that_dies_in_mid_transfer_frees_engine_and_ranks(
    sources: dict[str, Tensor], small: SyncSettings
) -> None:
    engine = ThreadEngine("engine", empty_like(sources))
    with (
        local_pool([engine], small) as supervisor,
        closing(SecondRank(supervisor, version := next_version())) as rank,
    ):
        died_at: list[float] = []

        def die_when_the_engine_waits() -> None:
            rank.join()
            until(lambda: "load" in engine.log)
            time.sleep(0.1)  # rank 0 has filled everything, the engine waits for rank 1
            died_at.append(time.monotonic())
            rank.die()

        outcomes = in_threads(
            lambda: publish(supervisor, sources, rank=0, world_size=2, version=version),
            die_when_the_engine_waits,
        )
        freed_after_s = time.monotonic() - died_at[0]
        until(lambda: not supervisor.coordinator.is_syncing)
        assert engine.lifecycle.state == EngineState.PENDING_WEIGHTS
        assert engine.killed is None

        publish(supervisor, sources, version=next_version())

    assert isinstance(outcomes[0], WeightSyncError)
    assert "rank 1 is lost: its process on node 1 (b) ended" in str(outcomes[0])
    assert freed_after_s < 5.0  # a rank that stands still ends the sync after 10 s
    assert engine.lifecycle.state == EngineState.SERVING


def test_an_engine_that_dies_in_mid_transfer_does_not_hold_the_others(
    sources: dict[str, Tensor], small: SyncSettings
) -> None:
    broken, sound = (ThreadEngine(name, empty_like(sources)) for name in ("broken", "sound"))
    broken.hang_at = "load"
    with local_pool([broken, sound], small) as supervisor:

        def die_when_the_rank_waits() -> None:
            until(broken.hanging.is_set)
            time.sleep(0.1)  # everything is filled
            supervisor.loop.run(broken.die())

        report, _ = in_threads(lambda: publish(supervisor, sources), die_when_the_rank_waits)

    assert list(report.engines) == ["sound"]
    assert "its process ended" in report.failed["broken"]
    assert sound.lifecycle.state == EngineState.SERVING
    assert raw_bytes(sound.destinations["a"]) == raw_bytes(sources["a"])


@pytest.mark.slow
def test_an_engine_that_stands_still_is_replaced(sources: dict[str, Tensor]) -> None:
    stuck, sound = (ThreadEngine(name, empty_like(sources)) for name in ("stuck", "sound"))
    stuck.hang_at = "load"
    begun_at = time.monotonic()
    with local_pool([stuck, sound], SMALL) as supervisor:
        report = publish(supervisor, sources, timeout_s=4.0)

    assert time.monotonic() - begun_at > 2.0
    assert list(report.engines) == ["sound"]
    # Three quarters of the four seconds, less what was over when the load began.
    assert re.match(r"load: no answer or no progress within [12]\.", report.failed["stuck"])
    assert "pool.sync_timeout_s" in report.failed["stuck"]
    assert stuck.killed is not None


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "is_in_time"), [(4.0, False), (20.0, True)])
def test_how_long_a_load_may_stand_still_is_up_to_the_time_of_the_sync(
    sources: dict[str, Tensor], timeout_s: float, is_in_time: bool
) -> None:
    slow, sound = (ThreadEngine(name, empty_like(sources)) for name in ("slow", "sound"))
    slow.load_takes_s = 3.5
    with local_pool([slow, sound], SMALL) as supervisor:
        report = publish(supervisor, sources, timeout_s=timeout_s)

    assert list(report.engines) == (["slow", "sound"] if is_in_time else ["sound"])
    assert (slow.killed is None) == is_in_time


def test_an_engine_has_most_of_the_time_of_the_sync_for_each_request(
    sources: dict[str, Tensor],
) -> None:
    engine = ThreadEngine("engine", empty_like(sources))
    with local_pool([engine], SMALL) as supervisor:
        publish(supervisor, sources, timeout_s=3600.0)

    assert engine.limits_s.keys() == {"prepare_update", "verify_update"}
    assert all(limit_s > 1800.0 for limit_s in engine.limits_s.values())


def test_an_engine_that_fails_in_each_incarnation_leaves_one_note(
    sources: dict[str, Tensor],
) -> None:
    engine = ThreadEngine("broken", empty_like(sources))
    with local_pool([engine], SMALL) as supervisor:
        for life in range(1, 4):
            engine.incarnation, engine.lifecycle = life, EngineLifecycle().started()
            engine.fail_at = "load"
            with pytest.raises(WeightSyncError):
                publish(supervisor, sources)
        engine.incarnation, engine.lifecycle = 4, EngineLifecycle().started()
        engine.fail_at = None
        report = publish(supervisor, sources)

    assert list(report.engines) == ["broken"]
    coordinator = supervisor.coordinator
    assert len(coordinator._discarded) == 1  # pyright: ignore[reportPrivateUsage]
    assert len(coordinator._verified) == 1  # pyright: ignore[reportPrivateUsage]


@pytest.mark.slow
def test_a_slow_rank_is_not_the_fault_of_an_engine(sources: dict[str, Tensor]) -> None:
    class Slow(LocalSupervisor):
        def sync(self, message: Any) -> Any:
            answer = super().sync(message)
            if isinstance(message, SyncBegin):
                time.sleep(4.5)
            return answer

    engine = ThreadEngine("engine", empty_like(sources))
    with local_pool([engine], SMALL) as plain:
        slow = Slow(plain.loop, plain.coordinator)
        report = publish(slow, sources, timeout_s=6.0)  # of which an engine may have 4 s

    assert list(report.engines) == ["engine"]
    assert engine.killed is None


def test_a_rank_that_gives_up_fails_the_others(
    sources: dict[str, Tensor], small: SyncSettings
) -> None:
    class GivesUp(LocalSupervisor):
        def sync(self, message: Any) -> Any:
            if isinstance(message, SyncFilled):
                raise RuntimeError("no memory on the host")
            return super().sync(message)

    engine = ThreadEngine("engine", empty_like(sources))
    with local_pool([engine], small) as plain:
        giving_up = GivesUp(plain.loop, plain.coordinator)
        options = {"world_size": 2, "version": next_version(), "timeout_s": 3.0}

        def give_up() -> None:
            with pytest.raises(RuntimeError, match="no memory on the host"):
                publish(giving_up, sources, rank=1, **options)

        outcome, _ = in_threads(lambda: publish(plain, sources, rank=0, **options), give_up)

    assert isinstance(outcome, WeightSyncError)
    assert "rank 1 aborted: RuntimeError: no memory on the host" in str(outcome)


@pytest.mark.slow
def test_a_rank_that_never_fills_ends_the_sync_by_its_lease(
    sources: dict[str, Tensor], small: SyncSettings
) -> None:
    engine = ThreadEngine("engine", empty_like(sources))
    with (
        local_pool([engine], small) as supervisor,
        closing(SecondRank(supervisor, version := next_version())) as rank,
    ):
        outcomes = in_threads(
            lambda: publish(
                supervisor, sources, rank=0, world_size=2, version=version, timeout_s=3.0
            ),
            rank.join,
        )
        until(lambda: not supervisor.coordinator.is_syncing)

    assert isinstance(outcomes[0], WeightSyncError)
    assert "not filled by ranks [1]" in str(outcomes[0])
    assert "ranks filled [35, 0]" in str(outcomes[0])
    assert engine.lifecycle.state == EngineState.PENDING_WEIGHTS
    assert engine.killed is None


class Deaf(ThreadEngine):
    """It connects to no rank."""

    async def prepare_update(
        self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
    ) -> None:
        kept = {name: value for name, value in buckets.items() if name != "receives"}
        await super().prepare_update(version, manifest, kept, timeout_s)


def test_a_rank_that_waits_for_links_hears_that_the_job_is_lost(
    sources: dict[str, Tensor],
) -> None:
    lost = threading.Event()

    class Losable(LocalSupervisor):
        def raise_if_lost(self) -> None:
            if lost.is_set():
                raise JobFailed("the supervisor is gone")

    engine = Deaf("engine", empty_like(sources))
    engine.hang_at = "load"
    with local_pool([engine], TCP) as plain:
        losable = Losable(plain.loop, plain.coordinator)

        def lose() -> None:
            until(engine.hanging.is_set)
            lost.set()

        begun_at = time.monotonic()
        outcomes = in_threads(lambda: publish(losable, sources), lose)

    assert isinstance(outcomes[0], JobFailed)
    assert time.monotonic() - begun_at < 5.0


@pytest.mark.parametrize("hangs_at", ["prepare_update", "verify_update"])
def test_an_engine_that_hangs_does_not_hold_an_aborted_sync(
    sources: dict[str, Tensor], small: SyncSettings, hangs_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic restart waits for it."""
    monkeypatch.setattr(engine_sync, "_ABORTED_LIMIT_S", 0.2)
    engine = ThreadEngine("engine", empty_like(sources))
    engine.hang_at = hangs_at
    with local_pool([engine], small) as supervisor:
        _, settled_after_s = in_threads(
            lambda: publish(supervisor, sources), lambda: supervisor.lose_rank(0, engine.hanging)
        )

    assert settled_after_s < 5.0, "the rank had set 20 s"
    assert engine.killed is not None
    assert "after the sync was aborted" in engine.killed


def test_an_engine_that_gets_ready_while_the_sync_is_aborted_is_not_to_blame(
    sources: dict[str, Tensor],
) -> None:
    """Over several nodes, an abort frees the memory that the engine is about to map."""
    aborted = threading.Event()

    class GetsReadyLate(ThreadEngine):
        async def prepare_update(
            self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
        ) -> None:
            self.hanging.set()
            await asyncio.to_thread(aborted.wait, 10.0)
            await super().prepare_update(version, manifest, buckets, timeout_s)

    def publish_in_vain() -> None:
        with pytest.raises(WeightSyncError):
            publish(supervisor, sources)
        aborted.set()

    engine = GetsReadyLate("engine", empty_like(sources))
    with local_pool([engine], SMALL) as supervisor:
        in_threads(publish_in_vain, lambda: supervisor.lose_rank(0, engine.hanging))

    assert engine.killed is None
    assert engine.log[-1] == "abort_update"


@pytest.mark.parametrize("on_update", ["abort", "drain"])
def test_a_sync_that_is_aborted_before_an_engine_is_paused_does_not_pause_it(
    sources: dict[str, Tensor], on_update: OnUpdate
) -> None:
    """What it generates would be lost for nothing; what it drains may take longer than it has."""
    aborted = threading.Event()

    class TakesTime(ThreadEngine):
        async def prepare_update(
            self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
        ) -> None:
            await super().prepare_update(version, manifest, buckets, timeout_s)
            if version == 2:
                self.hanging.set()
                await asyncio.to_thread(aborted.wait, 10.0)

    def publish_in_vain() -> None:
        with pytest.raises(WeightSyncError):
            publish(supervisor, sources, version=2)
        aborted.set()

    engine = TakesTime("engine", empty_like(sources))
    with local_pool([engine], replace(SMALL, on_update=on_update)) as supervisor:
        publish(supervisor, sources, version=1)
        engine.log.clear()
        in_threads(publish_in_vain, lambda: supervisor.lose_rank(0, engine.hanging))

        assert engine.log == ["prepare_update", "abort_update"]
        assert str(engine.lifecycle) == "SERVING(1)"


def test_a_rank_that_publishes_while_engines_commit_begins_the_next_sync(
    sources: dict[str, Tensor],
) -> None:
    has_begun = threading.Event()

    class CommitsLate(ThreadEngine):
        async def commit_update(self, version: int, timeout_s: float) -> None:
            self.hanging.set()
            await asyncio.to_thread(has_begun.wait, 10.0)
            await super().commit_update(version, timeout_s)

    async def begin(message: SyncCall) -> SyncAnswer:
        await engine.hanging.wait()
        try:
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(supervisor.coordinator.answer(message))
                await asyncio.sleep(0)
                has_begun.set()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return answering.result()

    class LaterRank(LocalSupervisor):
        def sync(self, message: SyncMessage[Answer]) -> Answer:
            return cast("Answer", self.loop.run(begin(cast("SyncCall", message))))

    engine = CommitsLate("engine", empty_like(sources))
    with local_pool([engine], SMALL) as supervisor:
        later = LaterRank(supervisor.loop, supervisor.coordinator)
        reports = in_threads(
            lambda: publish(supervisor, sources, version=1),
            lambda: publish(later, sources, version=2),
        )

    assert [report.version for report in reports] == [1, 2]


def test_an_engine_that_could_not_wake_is_replaced_even_if_the_sync_was_aborted(
    sources: dict[str, Tensor],
) -> None:
    aborted = threading.Event()

    class CannotWake(ThreadEngine):
        async def load(self, version: int, timeout_s: float) -> dict[str, Any]:
            self.lifecycle = self.lifecycle.begin_update(version)
            self.hanging.set()
            await asyncio.to_thread(aborted.wait, 10.0)
            raise WakeError("CUDA Error: out of memory")

    def publish_in_vain() -> None:
        with pytest.raises(WeightSyncError):
            publish(supervisor, sources)
        aborted.set()

    engine = CannotWake("engine", empty_like(sources))
    with local_pool([engine], SMALL) as supervisor:
        in_threads(publish_in_vain, lambda: supervisor.lose_rank(0, engine.hanging))

    assert engine.killed == "weight sync: load: CUDA Error: out of memory"


def test_an_engine_that_drains_goes_on_when_the_sync_is_aborted(sources: dict[str, Tensor]) -> None:
    engine = ThreadEngine("engine", empty_like(sources))
    with local_pool([engine], replace(SMALL, on_update="drain")) as supervisor:
        publish(supervisor, sources, version=1)
        engine.log.clear()
        engine.hang_at = "pause drain"
        failure, settled_after_s = in_threads(
            lambda: publish(supervisor, sources, version=2),
            lambda: supervisor.lose_rank(0, engine.hanging),
        )

        assert isinstance(failure, WeightSyncError)
        assert settled_after_s < 5.0
        assert engine.log == ["prepare_update", "pause drain", "abort_update", "resume"]
        assert str(engine.lifecycle) == "SERVING(1)"


@pytest.mark.slow
def test_a_deadline_of_the_rank_alone_ends_its_wait_for_links(
    sources: dict[str, Tensor],
) -> None:
    class Unbounded(LocalSupervisor):
        """Asks for a lease that outlives the rank's own patience."""

        def sync(self, message: Any) -> Any:
            if isinstance(message, SyncBegin):
                message = replace(message, deadline=time.monotonic() + 60.0)
            return super().sync(message)

    engine = Deaf("engine", empty_like(sources))
    engine.hang_at = "load"
    with local_pool([engine], TCP) as plain:
        unbounded = Unbounded(plain.loop, plain.coordinator)
        with pytest.raises(DeadlineExceeded, match="the time is used up"):
            publish(unbounded, sources, timeout_s=0.5)
