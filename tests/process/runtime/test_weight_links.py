"""The transport between nodes: real engines get weights through process groups, and may die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import weight_ranks
from pools_in_turn import RESTART, wait_until
from torch import Tensor

from umbra.engines.echo.echo_weights import weights_fingerprint
from umbra.runtime.collective import SessionSync
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session import Session
from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.runtime.weights.sync_calls import SyncReport
from umbra.runtime.weights.weight_publisher import WeightPublisher

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("pipe_of_stores")]


def start_pool(session: Session, **settings: Any) -> None:
    base: dict[str, Any] = {
        "engine": "echo",
        "count": 2,
        "mode": "standalone",
        "kwargs": {"verify_checksums": True, "weights_in_logprobs": True},
        "restart": RESTART,
        "transport": "nccl",
    }
    session.create_pool(PoolSpec(name="policy", **(base | settings)))


def fingerprint(tensors: dict[str, Tensor]) -> int:
    return weights_fingerprint([tensor.numpy().tobytes() for tensor in tensors.values()])


def held(session: Session) -> list[int]:
    """The fingerprint of each engine's weights."""
    return [session.actor(f"policy-{idx}").call("weights_fingerprint") for idx in range(2)]


def pid_of(session: Session, name: str) -> int:
    rows = session.supervisor_call("list_actors")
    return next(int(row["pid"]) for row in rows if row["name"] == name)


@dataclass
class TwoRanks:
    """Two ranks of this process, each in a thread. All tensors come from rank 0.

    `in_the_midst` is called once, when rank 0 reads half of the tensors to send them.
    """

    session: Session
    tensors: dict[str, Tensor]
    in_the_midst: Callable[[], None] | None = None

    def publish(self, version: int, timeout_s: float) -> list[SyncReport]:
        reports: list[SyncReport] = []
        self._located: list[int] = []

        def run(rank: int) -> None:
            publisher = WeightPublisher(
                SessionSync(self.session),
                rank,
                2,
                self.tensors,
                locate=self._locate,
                store_host="127.0.0.1",
            )
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


def test_uneven_shards_of_two_ranks_arrive_bit_for_bit_in_every_engine(
    umbra_session: Session, distributed_world: DistributedWorld
) -> None:
    start_pool(umbra_session)

    (transports, _) = distributed_world(
        weight_ranks.publish_shards,
        str(umbra_session.socket_dir),
        umbra_session.node_id,
        [1, 2, 3],  # the first with checksums, the others without
    )

    assert transports == ["nccl"] * 3
    assert held(umbra_session) == [fingerprint(weight_ranks.whole_tensors(3))] * 2


def test_an_engine_killed_in_mid_transfer_is_replaced_while_the_other_gets_the_version(
    umbra_session: Session,
) -> None:
    start_pool(umbra_session)
    ranks = TwoRanks(umbra_session, layers(1.0))
    ranks.publish(1, 30.0)
    pid = pid_of(umbra_session, "policy-0")
    ranks.in_the_midst = lambda: os.kill(pid, signal.SIGKILL)

    first, second = ranks.publish(2, 30.0)

    assert first == second, [first, second]
    assert list(first.engines) == ["policy-1"]
    assert list(first.failed) == ["policy-0"]

    ranks.in_the_midst = None
    pool = umbra_session.pool("policy")
    wait_until(lambda: pool.states()[0]["state"] == "PENDING_WEIGHTS")
    (report, _) = ranks.publish(2, 30.0)

    assert list(report.engines) == ["policy-0"]
    assert {state["version"] for state in pool.states()} == {2}
    assert held(umbra_session) == [fingerprint(ranks.tensors)] * 2


@pytest.mark.slow
def test_an_engine_stopped_in_mid_transfer_is_replaced_within_the_time_of_the_sync(
    umbra_session: Session,
) -> None:
    start_pool(umbra_session)
    ranks = TwoRanks(umbra_session, layers(1.0))
    ranks.publish(1, 60.0)  # the engines have imported torch then
    pid = pid_of(umbra_session, "policy-0")
    ranks.in_the_midst = lambda: os.kill(pid, signal.SIGSTOP)
    begun_at = time.monotonic()

    first, second = ranks.publish(2, 8.0)

    assert first == second, [first, second]
    assert time.monotonic() - begun_at < 8.0
    assert list(first.engines) == ["policy-1"], first
    assert "no progress within" in first.failed["policy-0"]
