"""Syncs between nodes that send what has changed: when they do, and that images never get the
changes to anything else than what they hold."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from local_world import (
    LocalSupervisor,
    ThreadEngine,
    empty_like,
    in_threads,
    local_pool,
    raw_bytes,
)
from torch import Tensor

from umbra.runtime.engine_api.lifecycle import EngineLifecycle, EngineState
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.links.link_sender import LinkSender
from umbra.runtime.weights.sync_messages import SyncGrant, SyncReport

NEVER = 1 << 30
DELTAS = SyncSettings(
    bucket_nbytes=1 << 14, verify_every=NEVER, full_sync_every=NEVER, transport="tcp"
)
NUM_WORDS = 100_000
ALL_NBYTES = 2 * NUM_WORDS


class Trainer:
    """One rank with tensors of bfloat16, of which each step changes some values.

    `in_the_midst` is called when half of a version has been sent.
    """

    def __init__(self, supervisor: LocalSupervisor) -> None:
        self.supervisor = supervisor
        self.tensors = {name: torch.randn(NUM_WORDS // 2).bfloat16() for name in ("a", "b")}
        self.version = 0
        self.in_the_midst: Callable[[], None] | None = None
        self._num_located = 0
        self.publisher = self._make_publisher()

    def _make_publisher(self) -> WeightPublisher:
        return WeightPublisher(self.supervisor, self.tensors, locate=self._locate)

    def _locate(self, tensor: Tensor) -> Tensor:
        self._num_located += 1  # first all are located to be exported, which they cannot
        if self._num_located == 4 and self.in_the_midst is not None:
            self.in_the_midst()
        return tensor

    def step(self, num_changed: int = 100) -> None:
        """Half of what it changes is in each tensor."""
        for tensor, num in zip(
            self.tensors.values(), (num_changed // 2, -(-num_changed // 2)), strict=True
        ):
            tensor.view(torch.int16)[torch.randperm(len(tensor))[:num]] ^= 1
        self.version += 1

    def publish(self) -> SyncReport:
        self._num_located = 0
        return self.publisher.publish("pool", self.version, timeout_s=20.0)

    def restart(self) -> None:
        self.publisher.close()
        self.publisher = self._make_publisher()

    def is_on(self, *engines: ThreadEngine) -> bool:
        return all(
            raw_bytes(engine.destinations[name]) == raw_bytes(tensor)
            for engine in engines
            for name, tensor in self.tensors.items()
        )


def far_engine(name: str = "engine") -> ThreadEngine:
    shape = torch.empty(NUM_WORDS // 2, dtype=torch.bfloat16)
    return ThreadEngine(name, empty_like({"a": shape, "b": shape}))


@contextmanager
def training(*engines: ThreadEngine, settings: SyncSettings = DELTAS) -> Generator[Trainer]:
    """After a first sync, which sends all weights."""
    with local_pool(engines, settings) as supervisor, closing_publisher(supervisor) as trainer:
        trainer.step()
        num_nodes = len({engine.node_id for engine in engines})
        assert trainer.publish().network_nbytes == ALL_NBYTES * num_nodes
        yield trainer


@contextmanager
def closing_publisher(supervisor: LocalSupervisor) -> Generator[Trainer]:
    trainer = Trainer(supervisor)
    try:
        yield trainer
    finally:
        trainer.publisher.close()


def restart(engine: ThreadEngine) -> None:
    if engine.lifecycle.state != EngineState.DEAD:
        engine.kill("the test restarts it")
    engine.destinations = empty_like(engine.destinations)
    engine.incarnation += 1
    engine.lifecycle = EngineLifecycle().started()
    engine.killed = engine.fail_at = None


def is_delta(report: SyncReport) -> bool:
    return 0 < report.network_nbytes < ALL_NBYTES / 10


def test_only_what_has_changed_is_sent_after_the_first_version() -> None:
    engines = far_engine("one"), far_engine("two")
    with training(*engines) as trainer:
        for num_changed in (100, 0, 1):
            trainer.step(num_changed)
            report = trainer.publish()

            ends_nbytes = 4 * -(-ALL_NBYTES // DELTAS.bucket_nbytes)
            assert report.network_nbytes == 2 * (4 * num_changed + ends_nbytes)
            assert trainer.is_on(*engines)


def test_a_bucket_of_which_much_has_changed_is_sent_whole() -> None:
    engine = far_engine()
    with training(engine) as trainer:
        trainer.step(NUM_WORDS)
        assert trainer.publish().network_nbytes == ALL_NBYTES
        assert trainer.is_on(engine)

        trainer.step()
        assert is_delta(trainer.publish())
        assert trainer.is_on(engine)


def test_all_weights_are_sent_by_default() -> None:
    engine = far_engine()
    with training(engine, settings=replace(DELTAS, full_sync_every=1)) as trainer:
        trainer.step()
        assert trainer.publish().network_nbytes == ALL_NBYTES
        assert trainer.is_on(engine)


def test_full_versions_come_at_their_cadence_and_the_last_delta_before_has_checksums() -> None:
    engine, seen = far_engine(), list[tuple[bool, bool]]()

    class Recorder(LocalSupervisor):
        def sync(self, message: Any) -> Any:
            answer = super().sync(message)
            if isinstance(answer, SyncGrant):
                self.has_checksums = answer.has_checksums
            return answer

    with training(engine, settings=replace(DELTAS, full_sync_every=3)) as trainer:
        plain = trainer.supervisor
        recorder = Recorder(plain.loop, plain.coordinator)
        trainer.publisher._session = recorder  # pyright: ignore[reportPrivateUsage]
        for _ in range(6):
            trainer.step()
            seen.append((is_delta(trainer.publish()), recorder.has_checksums))
            assert trainer.is_on(engine)

    assert seen == [(True, False), (True, True), (False, False)] * 2


def test_an_engine_that_was_replaced_gets_the_same_version_without_its_bytes() -> None:
    """The image of its node has them."""
    engine = far_engine()
    with training(engine) as trainer:
        trainer.step()
        trainer.publish()
        restart(engine)
        assert trainer.publish().network_nbytes < 100, "nothing has changed"
        assert trainer.is_on(engine)

        restart(engine)
        trainer.step()
        assert is_delta(trainer.publish())
        assert trainer.is_on(engine)


def test_a_node_that_joins_gets_all_weights_and_the_others_still_what_has_changed() -> None:
    first, second = far_engine("first"), far_engine("second")
    engines = [first]
    with local_pool(engines, DELTAS) as supervisor:
        trainer = Trainer(supervisor)
        trainer.step()
        trainer.publish()
        second.node_id = "node of second"
        engines.append(second)

        assert list(trainer.publish().engines) == ["second"]
        trainer.step()
        assert is_delta(trainer.publish())
        assert trainer.is_on(first, second)

        trainer.publisher.close()


def test_a_node_that_joins_with_a_new_version_is_the_only_one_that_gets_all_of_it() -> None:
    first, second = far_engine("first"), far_engine("second")
    engines = [first]
    with local_pool(engines, DELTAS) as supervisor:
        trainer = Trainer(supervisor)
        trainer.step()
        trainer.publish()
        second.node_id = "node of second"
        engines.append(second)
        trainer.step()
        report = trainer.publish()

        assert ALL_NBYTES < report.network_nbytes < ALL_NBYTES * 1.1
        assert trainer.is_on(first, second)
        trainer.publisher.close()


def test_a_node_that_missed_a_version_gets_all_weights() -> None:
    here, away = far_engine("here"), far_engine("away")
    with training(here, away) as trainer:
        away.kill("it is away for one version")
        trainer.step()
        assert is_delta(trainer.publish())
        restart(away)
        trainer.step()
        report = trainer.publish()

        assert ALL_NBYTES < report.network_nbytes < ALL_NBYTES * 1.1
        assert trainer.is_on(here, away)


def test_a_lost_image_is_filled_with_all_weights() -> None:
    engine = far_engine()
    with training(engine) as trainer:
        trainer.supervisor.free_images()
        trainer.step()
        assert trainer.publish().network_nbytes == ALL_NBYTES
        assert trainer.is_on(engine)


def test_a_node_whose_receiver_is_lost_half_way_gets_all_weights_and_the_others_a_delta() -> None:
    here, lost = far_engine("here"), far_engine("lost")
    with training(here, lost) as trainer:
        trainer.in_the_midst = lambda: lost.kill("the test ends it")
        trainer.step()
        report = trainer.publish()
        assert list(report.engines) == ["here"]
        trainer.in_the_midst = None
        restart(lost)
        trainer.step()
        report = trainer.publish()

        assert ALL_NBYTES < report.network_nbytes < ALL_NBYTES * 1.1
        assert trainer.is_on(here, lost)


def test_checksums_find_that_a_delta_lacks_a_change() -> None:
    engine = far_engine()
    with training(engine, settings=replace(DELTAS, full_sync_every=4)) as trainer:
        for _ in range(2):
            trainer.step()
            assert is_delta(trainer.publish())
        trainer.step()
        sender = trainer.publisher._senders["tcp"]  # pyright: ignore[reportPrivateUsage]
        assert isinstance(sender, LinkSender)
        kept = sender._sent._buckets[0]  # pyright: ignore[reportPrivateUsage]
        kept.copy_(trainer.tensors["a"].view(torch.uint8)[: len(kept)])

        with pytest.raises(WeightSyncError, match="corrupted on arrival: a bytes"):
            trainer.publish()

        restart(engine)
        assert trainer.publish().network_nbytes == ALL_NBYTES
        assert trainer.is_on(engine)


def test_an_image_that_was_found_wrong_gets_no_delta_but_all_weights() -> None:
    """The version after it is not a full one."""
    near, far = far_engine("near"), far_engine("far")
    settings = replace(DELTAS, verify_every=3)
    with training(near, far, settings=settings) as trainer:
        trainer.step()
        trainer.publish()
        damage_image(trainer, far)
        trainer.step()
        assert is_delta(trainer.publish())
        trainer.step()
        report = trainer.publish()  # with checksums
        assert is_delta(report)
        assert "corrupted on arrival" in report.failed["far"]
        assert list(report.engines) == ["near"]

        restart(far)
        trainer.step()
        report = trainer.publish()

        assert ALL_NBYTES < report.network_nbytes < ALL_NBYTES * 1.1
        assert trainer.is_on(near, far)


def damage_image(trainer: Trainer, engine: ThreadEngine) -> None:
    node = trainer.supervisor.images._nodes[engine.node_id]  # pyright: ignore[reportPrivateUsage]
    memory = node._memories["pool"]  # pyright: ignore[reportPrivateUsage]
    fd = memory._fd  # pyright: ignore[reportPrivateUsage]
    os.pwrite(fd, bytes([os.pread(fd, 1, 1)[0] ^ 0x40]), 1)


@pytest.mark.slow
def test_a_delta_to_an_image_with_other_contents_is_refused() -> None:
    """Not even a supervisor that is wrong about what an image holds can make it wrong."""
    engine = far_engine()

    class Mistaken(LocalSupervisor):
        contents = ""

        def sync(self, message: Any) -> Any:
            answer = super().sync(message)
            if not isinstance(answer, SyncGrant):
                return answer
            bases = [self.contents] if self.contents else answer.details["bases"]
            self.contents = answer.details["contents"]
            return replace(answer, details={**answer.details, "bases": bases})

    with local_pool([engine], DELTAS) as plain:
        supervisor = Mistaken(plain.loop, plain.coordinator)
        with closing_publisher(supervisor) as trainer:
            trainer.step()
            trainer.publish()
            plain.free_images()
            trainer.step()

            with pytest.raises(WeightSyncError, match="but the image holds nothing complete"):
                trainer.publish()


def test_each_rank_sends_what_has_changed_in_its_shards() -> None:
    """Rank 1 holds nothing here but is on the engine's node, and fills its image directly."""
    engine = far_engine()
    with local_pool([engine], DELTAS) as supervisor:
        trainer = Trainer(supervisor)
        second = WeightPublisher(supervisor.as_rank(1, 2, engine.node_id), trainer.tensors)
        first = WeightPublisher(supervisor.as_rank(0, 2), trainer.tensors)
        with closing(first), closing(second), closing(trainer.publisher):
            for is_first in (True, False, False):
                trainer.step()
                publish = [
                    partial(each.publish, "pool", trainer.version, 20.0) for each in (first, second)
                ]
                reports = in_threads(*publish)

                assert [is_delta(report) for report in reports] == [not is_first] * 2
                assert trainer.is_on(engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_in_between_each_engine_has_what_the_rank_has(seed: int) -> None:
    draw = random.Random(seed)
    near, far = engines = far_engine("near"), far_engine("far")
    settings = replace(DELTAS, full_sync_every=draw.choice([3, NEVER]))
    num_deltas = 0
    with training(*engines, settings=settings) as trainer:

        def fail() -> None:
            raise RuntimeError("the GPU is lost")

        def rank_fails() -> None:
            trainer.in_the_midst = fail
            trainer.step()
            with pytest.raises(RuntimeError, match="the GPU is lost"):
                trainer.publish()
            trainer.in_the_midst = None

        def engine_leaves_for_a_version() -> None:
            engine = draw.choice(engines)
            engine.kill("it leaves")
            trainer.step()
            trainer.publish()
            restart(engine)

        def engine_fails() -> None:
            engine = draw.choice(engines)
            engine.fail_at = draw.choice(["prepare_update", "load"])
            trainer.step()
            trainer.publish()
            restart(engine)

        happenings: list[Callable[[], None]] = [
            lambda: restart(draw.choice(engines)),
            trainer.restart,
            trainer.supervisor.free_images,
            lambda: trainer.step(NUM_WORDS),
            rank_fails,
            engine_leaves_for_a_version,
            engine_fails,
        ]
        for _ in range(25):
            for happens in draw.sample(happenings, draw.choice([0, 1, 1, 2])):
                happens()
            trainer.step()
            num_deltas += is_delta(trainer.publish())
            assert trainer.is_on(near, far)
    assert num_deltas
