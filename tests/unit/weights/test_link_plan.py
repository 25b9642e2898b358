"""What the lead knows in a sync between nodes: which images are filled, and which are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from async_tests import on_a_loop

from umbra.runtime.errors import ConnectionLost, ProtocolError, UmbraError, WeightSyncError
from umbra.runtime.weights.image.image_memory import ImageMemory, ImageOrder, PlanParts
from umbra.runtime.weights.links.link_plan import ImageFollower, LinkPlan, LinkProgress
from umbra.runtime.weights.shards import wire_manifest
from umbra.runtime.weights.sync_messages import LinkState, SyncProgressed
from umbra.runtime.weights.transport import LayoutOrder, ProbedEngine, RankOffer

MANIFEST = wire_manifest({"a": torch.zeros(512)})  # of four buckets
MAPPED: dict[str, Any] = {"image": {}, "fd_socket": "fds", "progress": {}, "holds": "x"}


class Images:
    """Images whose states a test puts into `states`, by node; None ends them, an error loses them.
    Each is mapped at once, but for those of the nodes in `slow`."""

    def __init__(self, *nodes: str, slow: Sequence[str] = ()) -> None:
        self.states = {node: asyncio.Queue[dict[str, Any] | UmbraError | None]() for node in nodes}
        self.released = {node: asyncio.Event() for node in nodes}
        for node, states in self.states.items():
            if node not in slow:
                states.put_nowait(MAPPED)

    @asynccontextmanager
    async def hold(
        self, node_id: str, order: ImageOrder
    ) -> AsyncGenerator[AsyncIterator[dict[str, Any]]]:
        try:
            yield self._states(node_id)
        finally:
            self.released[node_id].set()

    async def _states(self, node_id: str) -> AsyncIterator[dict[str, Any]]:
        while (state := await self.states[node_id].get()) is not None:
            if isinstance(state, UmbraError):
                raise state
            yield state


@dataclass
class Engine:
    node_id: str


@asynccontextmanager
async def laid_out(
    images: Images, engines: str, ranks: str, timeout_s: float = 10.0
) -> AsyncGenerator[tuple[LinkProgress, list[ImageFollower]]]:
    """Engines and ranks are given by the letters of their nodes."""
    order = LayoutOrder(
        manifest=MANIFEST,
        bucket_nbytes=512,
        ranks=[
            RankOffer(rank=rank, node_id=node, offer="HOST:1") for rank, node in enumerate(ranks)
        ],
        engines=cast("list[ProbedEngine]", [Engine(node) for node in engines]),
        has_checksums=False,
        timeout_s=timeout_s,
    )
    plan = LinkPlan(PlanParts("pool", cast("ImageMemory", None), images, is_staged=False))
    async with asyncio.timeout(10.0), plan.lay_out(order) as layout:
        progress = layout.progress
        assert isinstance(progress, LinkProgress)
        assert layout.num_buckets == 4
        yield progress, [progress.node_of(number) for number in range(len(engines))]


def has_read(rank: int, num_buckets: int) -> SyncProgressed:
    return SyncProgressed(sync_id="pool-1", deadline=0.0, rank=rank, num_filled=num_buckets)


def facts(progress: LinkProgress, number: int) -> str:
    """Whether the engine may load, has work, and has to receive."""
    node = progress.node_of(number)
    return (
        "load " * node.may_load(number)
        + "work " * progress.has_work(number)
        + "receive" * node.has_to_receive(number)
    ).strip()


@on_a_loop
async def test_engines_receive_work_and_load_as_buckets_are_read_filled_and_loaded() -> None:
    images = Images("a", "b")
    # Engines 0 and 1 are on a node without ranks: 0 receives for both. Engine 2 is with all ranks.
    async with laid_out(images, "aab", "bb") as (progress, (near, same, far)):
        assert near is same
        rows: list[tuple[Any, list[str]]] = [
            # a rank and the buckets that it has read, or a node's (filled, loaded, stopped)
            ((0, 2), ["", "", ""]),
            ((1, 1), ["work receive", "", ""]),
            (("a", 1, [0, 0], [False, False]), ["work", "work", ""]),
            (("a", 1, [1, 0], [False, False]), ["", "work", ""]),
            ((1, 4), ["work receive", "work", ""]),
            (("a", 2, [2, 2], [False, True]), ["", "load", ""]),
            ((0, 4), ["work receive", "load", ""]),
            (("a", 4, [2, 4], [False, False]), ["load work", "load", ""]),
            (("b", 4, [3], [False]), ["load work", "load", "load work"]),
        ]
        for what, expected in rows:
            changed = [node.changed for node in (near, far)]
            if isinstance(what[0], str):
                node, filled, loaded, stopped = what
                state = {"filled": filled, "loaded": loaded, "stopped": stopped}
                images.states[node].put_nowait(state)
                await changed[0 if node == "a" else 1].wait()
            else:
                rank, num_read = what
                before = min(progress.num_filled())
                report = has_read(rank, num_read)
                assert progress.observe(report) == LinkState(is_aborted=False, gone=[])
                has_moved = min(progress.num_filled()) > before
                assert [each.is_set() for each in changed] == [has_moved] * 2, what

            assert [facts(progress, number) for number in range(3)] == expected, what
        assert [progress.num_loaded(number) for number in range(3)] == [2, 4, 3]
        assert progress.num_filled() == [4, 4]
        with pytest.raises(ProtocolError, match="rank 2 reports to a sync of 2"):
            progress.observe(has_read(2, 1))


@pytest.mark.parametrize(
    ("lost", "filled", "is_gone"), [(0, 3, True), (1, 3, False), (0, 4, False), (2, 0, False)]
)
@on_a_loop
async def test_a_lost_receiver_costs_its_node_the_version_until_the_image_is_filled(
    lost: int, filled: int, is_gone: bool
) -> None:
    images = Images("a", "b")
    async with laid_out(images, "aab", "b") as (progress, (near, _, far)):
        changed = near.changed
        images.states["a"].put_nowait({"filled": filled, "loaded": [0, 0], "stopped": [False] * 2})
        await changed.wait()
        changed = near.changed
        progress.dismiss(lost)

        assert [progress.is_cut_off(number) for number in range(3)] == [is_gone, is_gone, False]
        assert changed.is_set() == is_gone, "who waits for the node is woken"
        assert near.may_load(1) == (is_gone or filled == 4)
        assert [near.has_lost, far.has_lost] == [lost < 2, lost == 2]
        report = has_read(0, 4)
        assert progress.observe(report).gone == ([0] if is_gone else [])


@pytest.mark.parametrize("end", [None, ConnectionLost("node a"), {"filled": 1}, "abort"])
@on_a_loop
async def test_a_node_whose_image_ends_is_gone_once(end: Any) -> None:
    images = Images("a", "b")
    async with laid_out(images, "ab", "b") as (progress, (near, far)):
        changed = near.changed
        if end == "abort":
            progress.abort()
        else:
            images.states["a"].put_nowait(end)
        await changed.wait()
        near.end()
        await images.released["a"].wait()

        report = has_read(0, 4)
        state = LinkState(is_aborted=end == "abort", gone=[0, 1] if end == "abort" else [0])
        assert progress.observe(report) == state
        assert (near.is_gone, far.is_gone) == (True, end == "abort")


@on_a_loop
async def test_nodes_that_make_no_image_in_time_do_not_take_part() -> None:
    images = Images("a", "b", slow="b")
    async with laid_out(images, "ab", "c", timeout_s=0.05) as (_, (near, far)):
        assert (near.is_gone, far.is_gone, near.holds) == (False, True, "x")
    images = Images("a", "b", slow="b")
    images.states["b"].put_nowait(ConnectionLost("node b"))
    async with laid_out(images, "ab", "c", timeout_s=3600.0) as (_, (near, far)):
        assert (near.is_gone, far.is_gone) == (False, True)
    with pytest.raises(WeightSyncError, match="no image could be made on the nodes a, b"):
        async with laid_out(Images("a", "b", slow="ab"), "ab", "c", timeout_s=0.05):
            pass
