"""Engines of another node get what has changed in the weights, and may die in between."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from pools_in_turn import wait_until
from session_rank import SessionRank
from torch import Tensor
from two_nodes import FAR, NEAR, TwoNodes, fingerprint, two_nodes

from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.testing.factories import SessionFactory
from umbra.runtime.weights.sync_messages import SyncReport

pytestmark = [pytest.mark.process, pytest.mark.slow]

FULL_EVERY = 7
NUM_TENSORS, TENSOR_WORDS = 10, 500_000
ALL_NBYTES = NUM_TENSORS * TENSOR_WORDS * 2


@pytest.fixture
def nodes(umbra_session_factory: SessionFactory, tmp_path: Path) -> Iterator[TwoNodes]:
    with two_nodes(umbra_session_factory, tmp_path, full_sync_every=FULL_EVERY) as nodes:
        yield nodes


class Trainer:
    """One rank. `kills` is a process that is killed when half of the weights were read to be
    sent."""

    def __init__(self, nodes: TwoNodes) -> None:
        self.tensors = {
            f"layer{idx}": torch.randn(TENSOR_WORDS).bfloat16() for idx in range(NUM_TENSORS)
        }
        self.kills = 0
        self._num_located = 0
        self._version = 0
        rank = SessionRank(nodes.lead, tcp_host="127.0.0.1")
        self.publisher = WeightPublisher(rank, self.tensors, locate=self._locate)

    def _locate(self, tensor: Tensor) -> Tensor:
        self._num_located += 1
        # First all are located to be exported, which they cannot.
        if self.kills and self._num_located == NUM_TENSORS + NUM_TENSORS // 2:
            os.kill(self.kills, signal.SIGKILL)
        return tensor

    def step(self) -> None:
        """Changes one value in a thousand."""
        for tensor in self.tensors.values():
            places = torch.randint(TENSOR_WORDS, (TENSOR_WORDS // 1000,))
            tensor.view(torch.int16)[places] += 1
        self._version += 1

    def publish(self) -> SyncReport:
        self._num_located = 0
        return self.publisher.publish("policy", self._version, 30.0)


def test_images_get_what_has_changed_whatever_dies_in_between(nodes: TwoNodes) -> None:
    trainer = Trainer(nodes)
    sent_nbytes: list[int] = []

    def publish() -> SyncReport:
        report = trainer.publish()
        sent_nbytes.append(report.network_nbytes)
        return report

    def all_have_it() -> bool:
        return nodes.fingerprints() == [fingerprint(trainer.tensors)] * 4

    with closing(trainer.publisher):
        for _ in range(2):
            trainer.step()
            publish()
            assert all_have_it()
        whole, delta = sent_nbytes
        assert whole == ALL_NBYTES
        assert delta < ALL_NBYTES / 100

        os.kill(nodes.pid(FAR[0]), signal.SIGKILL)  # it receives for its node
        wait_until(lambda: nodes.incarnation(FAR[0]) == 2)
        wait_until(lambda: nodes.state(FAR[0]) == "PENDING_WEIGHTS")
        assert list(publish().engines) == [FAR[0]]  # from the image that the last one filled
        assert sent_nbytes[-1] < delta, "nothing has changed"
        assert all_have_it()
        trainer.step()
        publish()
        assert sent_nbytes[-1] < ALL_NBYTES / 100
        assert all_have_it()

        trainer.step()
        trainer.kills = nodes.pid(FAR[0])
        report = trainer.publish()  # two syncs: the other engine of the node was left as it was
        assert {*NEAR, FAR[1]} <= report.engines.keys()
        assert report.network_nbytes >= ALL_NBYTES, "the image was half changed"
        trainer.kills = 0
        wait_until(lambda: nodes.state(FAR[0]) in ("PENDING_WEIGHTS", "SERVING"))
        trainer.step()
        publish()
        assert sent_nbytes[-1] < ALL_NBYTES / 100
        assert all_have_it()
