"""The transport between nodes: real engines of two nodes get weights, and may die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import weight_ranks
from pools_in_turn import wait_until
from process_runs import greedy
from session_rank import SessionRank
from torch import Tensor
from two_nodes import FAR, NEAR, TwoNodes, fingerprint, two_nodes

from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.runtime.testing.factories import SessionFactory
from umbra.runtime.weights.sync_messages import SyncReport

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def nodes(umbra_session_factory: SessionFactory, tmp_path: Path) -> Iterator[TwoNodes]:
    with two_nodes(umbra_session_factory, tmp_path) as nodes:
        yield nodes


@dataclass
class TwoRanks:
    """Two ranks of this process, each in a thread. All tensors come from rank 0.

    `in_the_midst` is called once, when rank 0 reads half of the tensors to send them.
    """

    lead: Session
    tensors: dict[str, Tensor]
    in_the_midst: Callable[[], None] | None = None

    def publish(self, version: int, timeout_s: float) -> list[SyncReport]:
        reports: list[SyncReport] = []
        self._located: list[int] = []

        def run(rank: int) -> None:
            one = SessionRank(self.lead, rank, 2, "127.0.0.1")
            publisher = WeightPublisher(one, self.tensors, locate=self._locate)
            with closing(publisher):
                reports.append(publisher.publish("policy", version, timeout_s))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s + 10.0)
            assert not thread.is_alive()
        return reports

    def _locate(self, tensor: Tensor) -> Tensor:
        self._located.append(id(tensor))
        middle = list(self.tensors.values())[len(self.tensors) // 2]
        # First all are located to be exported, which they cannot.
        if tensor is middle and self._located.count(id(tensor)) == 2 and self.in_the_midst:
            self.in_the_midst()
        return tensor


def layers(seed: float) -> dict[str, Tensor]:
    """20 MB, in many buckets."""
    return {f"layer{idx}": torch.full((250_000,), seed + idx) for idx in range(20)}


def test_engines_generate_while_the_images_are_filled(nodes: TwoNodes) -> None:
    ranks = TwoRanks(nodes.lead, layers(1.0))
    ranks.publish(1, 30.0)
    generated: dict[str, int] = {}

    def generate() -> None:  # half of the weights are on their way, and the rank waits for this
        for name in [*NEAR, *FAR]:
            generated[name] = len(greedy(nodes.engine(name)))
            assert nodes.state(name) == "SERVING"

    ranks.tensors, ranks.in_the_midst = layers(2.0), generate
    first, second = ranks.publish(2, 60.0)

    assert first == second
    assert sorted(first.engines) == [*NEAR, *FAR]
    assert generated == dict.fromkeys([*NEAR, *FAR], 20)
    assert nodes.fingerprints() == [fingerprint(ranks.tensors)] * 4


def test_uneven_shards_of_two_ranks_arrive_bit_for_bit_in_every_engine(
    nodes: TwoNodes, umbra_distributed_world: DistributedWorld
) -> None:
    (transports, _) = umbra_distributed_world(
        weight_ranks.publish_shards,
        str(nodes.lead.socket_dir),
        list(nodes.node_ids),
        [1, 2, 3],  # the first with checksums, the others without
    )

    assert transports == ["tcp"] * 3
    assert nodes.fingerprints() == [fingerprint(weight_ranks.whole_tensors(3))] * 4


def test_an_engine_whose_receiver_is_killed_gets_the_version_with_the_next_sync(
    nodes: TwoNodes,
) -> None:
    ranks = TwoRanks(nodes.lead, layers(1.0))
    ranks.publish(1, 30.0)
    receiver = nodes.pid(FAR[0])
    ranks.tensors, ranks.in_the_midst = layers(2.0), lambda: os.kill(receiver, signal.SIGKILL)

    first, second = ranks.publish(2, 30.0)  # two syncs: the engine was left as it was

    assert first == second, [first, second]
    assert {*NEAR, FAR[1]} <= first.engines.keys(), first
    assert sorted(first.failed) == FAR
    assert "received for node" in first.failed[FAR[1]]
    assert nodes.state(FAR[1]) == "SERVING"
    assert nodes.incarnation(FAR[1]) == 1, "it was not restarted"

    ranks.in_the_midst = None
    wait_until(lambda: nodes.state(FAR[0]) in ("PENDING_WEIGHTS", "SERVING"))
    ranks.publish(2, 30.0)
    assert nodes.fingerprints() == [fingerprint(ranks.tensors)] * 4
