"""Tensors whose memory goes elsewhere as soon as a sync has read them."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import torch
from local_world import ThreadEngine, empty_like, in_threads, local_pool, raw_bytes
from torch import Tensor

from umbra.runtime.pools.pool_spec import SyncSettings
from umbra.runtime.session.weight_publisher import WeightPublisher

SOURCES = {"a": torch.randn(1000), "b": torch.randn(7, 5)}
SMALL = SyncSettings(bucket_nbytes=512, verify_every=1)


class Mover:
    """Overwrites the tensors when they have been read, and keeps copies to read from later."""

    def __init__(self, engine: ThreadEngine) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in SOURCES.items()}
        self.log_when_read: list[list[str]] = []
        self._copies: dict[int, Tensor] = {}
        self._engine = engine

    def send_away(self) -> None:
        self.log_when_read.append(list(self._engine.log))
        if not self._copies:
            self._copies = {id(tensor): tensor.clone() for tensor in self.tensors.values()}
            for tensor in self.tensors.values():
                tensor.zero_()

    def locate(self, tensor: Tensor) -> Tensor:
        return self._copies.get(id(tensor), tensor)


def test_tensors_are_read_before_the_engine_takes_memory_for_its_cache() -> None:
    engine = ThreadEngine("engine", empty_like(SOURCES))
    movers = [Mover(engine), Mover(engine)]
    with local_pool([engine], SMALL) as supervisor:

        def publish(rank: int, version: int) -> None:
            mover = movers[rank]
            publisher = WeightPublisher(
                supervisor.as_rank(rank, 2),
                mover.tensors,
                locate=mover.locate,
            )
            with closing(publisher):
                publisher.publish("pool", version, 20.0, mover.send_away)

        for version in (1, 2):  # the second one reads the copies
            engine.sleep(2)
            engine.log.clear()
            engine.destinations = empty_like(SOURCES)
            both = [partial(publish, rank, version) for rank in range(2)]
            assert in_threads(*both) == [None, None]
            assert "commit_update" in engine.log
            for name, tensor in SOURCES.items():
                assert raw_bytes(engine.destinations[name]) == raw_bytes(tensor)

    for mover in movers:
        assert len(mover.log_when_read) == 2
        for log in mover.log_when_read:
            assert not {"verify_update", "commit_update"} & set(log)
