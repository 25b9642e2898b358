"""Which jobs may change their nodes, and how the starts of their ranks are told apart."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from async_tests import on_a_loop

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.cluster.job_links import JobLinks
from umbra.runtime.cluster.job_nodes import JobNode, check_several_nodes, next_epoch
from umbra.runtime.errors import ActorNotFound, ConfigError
from umbra.runtime.rpc.rpc_client import Client


def environment(**changes: str) -> TorchrunEnvironment:
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return TorchrunEnvironment.read({**variables, **changes})


class Unexpected:
    """Nothing happens on other nodes."""

    def on_node_event(self, node: int, event: dict[str, Any]) -> None:
        raise AssertionError(event)

    def on_node_lost(self, node: int, why: str) -> None:
        raise AssertionError(why)

    def on_node_left(self, node: int) -> None:
        raise AssertionError(node)


class Leaving(Unexpected):
    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    def on_node_left(self, node: int) -> None:
        self.has_left.set()


OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def test_nodes_may_change_with_restarts_and_a_store_of_each_start() -> None:
    assert environment(TORCHELASTIC_MAX_RESTARTS="3", **OWN_STORE).nodes_may_change
    assert not environment(**OWN_STORE).nodes_may_change
    check_several_nodes(environment(TORCHELASTIC_MAX_RESTARTS="3", **OWN_STORE))


@pytest.mark.parametrize("count", ["0", "1"])  # of 1: the last restart has happened
def test_restarts_that_would_look_for_the_last_store_are_refused(count: str) -> None:
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_several_nodes(
            environment(TORCHELASTIC_MAX_RESTARTS="1", TORCHELASTIC_RESTART_COUNT=count)
        )


def test_a_job_that_shrank_to_one_node_still_spans_nodes() -> None:
    left = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}

    assert environment(TORCHELASTIC_MAX_RESTARTS="3", **OWN_STORE, **left).spans_nodes
    assert not environment(TORCHELASTIC_MAX_RESTARTS="3", **left).spans_nodes


def test_a_change_of_nodes_is_told_by_the_store_where_the_count_of_restarts_stays() -> None:
    before, after = (environment(MASTER_PORT=port, **OWN_STORE) for port in ("40001", "40002"))

    assert before.incarnation == after.incarnation
    assert before.round_id != after.round_id


def test_a_restart_on_one_node_is_told_by_its_count_because_the_agents_store_stays() -> None:
    assert environment().round_id == ""


def test_the_next_epoch_is_new_to_every_node() -> None:
    """One node was in epochs 1 to 3, one was cut off in epoch 2, and one is new."""
    nodes = [JobNode(node_id=str(epoch), num_ranks=1, epoch=epoch) for epoch in (3, 1, 0)]

    assert next_epoch(nodes) == next_epoch(nodes[::-1]) == 4


@on_a_loop
async def test_the_node_of_a_rank_is_named_if_there_are_several() -> None:
    async with Client("node-0") as client:
        links = JobLinks(client)
        links.nodes = [JobNode(node_id="a", num_ranks=2)]
        assert links.node_of_rank(1) == ""

        links.nodes.append(JobNode(node_id="b", num_ranks=1))
        assert [links.node_of_rank(rank) for rank in (1, 2)] == ["node 0 (a)", "node 1 (b)"]


@on_a_loop
async def test_calls_of_an_earlier_epoch_are_refused() -> None:
    async with Client("node-0") as client, asyncio.TaskGroup() as tasks:
        links = JobLinks(client)
        me = JobNode(node_id="node-0", num_ranks=1)
        links.begin([me], 0, 2, Unexpected(), tasks)
        assert await links.connect(2, (), 1.0, tasks)
        with pytest.raises(ActorNotFound, match="epoch 1 is not 2"):
            await links.report(1, 1, {"kind": "failed", "message": "of the last epoch"})
        with pytest.raises(ActorNotFound, match="epoch 1 is not 2"):
            await anext(links.join(1, 1, ()))
        with pytest.raises(ActorNotFound, match="epoch 1 is not 2"):
            await links.check_epoch(1)
        await links.check_epoch(2)
        links.start_over()


@on_a_loop
async def test_what_comes_late_from_the_last_epoch_is_not_taken_for_the_next() -> None:
    """A rank that has ended, and a call of another supervisor while the nodes have yet to meet."""

    async with Client("node-0") as client, asyncio.TaskGroup() as tasks:
        links = JobLinks(client)
        me = JobNode(node_id="node-0", num_ranks=1)
        links.begin([me], 0, 1, Unexpected(), tasks)
        links.start_over()
        assert not await links.connect(1, (), 1.0, tasks)
        assert not links.has_met

        async def meet() -> None:
            links.begin([me], 0, 2, Unexpected(), tasks)

        with pytest.raises(ActorNotFound, match="epoch 1 is not 2"):
            await asyncio.gather(links.check_epoch(1), meet())
        assert not await links.connect(1, (), 1.0, tasks)
        assert await links.connect(2, (), 1.0, tasks)
        assert links.has_met
        links.start_over()


@on_a_loop
async def test_a_member_may_join_while_the_lead_brings_its_engines_to_rest() -> None:
    """It would take a lead that answers later than it by 8 s for lost."""

    async with Client("node-0") as client, asyncio.TaskGroup() as tasks:
        links = JobLinks(client)
        nodes = [JobNode(node_id=f"node-{idx}", num_ranks=1) for idx in range(2)]
        links.begin(nodes, 0, 2, Unexpected(), tasks)
        joined = links.join(2, 1, ({"name": "policy-1"},))
        async with asyncio.timeout(1.0):
            assert await anext(joined) == {"kind": "beat"}
        assert await links.connect(2, (), 1.0, tasks)
        assert links.warm_elsewhere() == {1: ({"name": "policy-1"},)}
        await joined.aclose()
        links.start_over()


@on_a_loop
async def test_a_machine_that_was_lost_may_come_back_under_the_same_name() -> None:
    """As in a container, whose host name and process ids are the same after each start."""
    events = Leaving()

    async with Client("node-0") as client, asyncio.TaskGroup() as tasks:
        links = JobLinks(client)
        links.begin([JobNode(node_id="node-0", num_ranks=1)], 0, 1, events, tasks)
        await asyncio.sleep(0)  # the links are watched from here on
        generators = [
            JobNode(node_id="pod-7", num_ranks=0, tcp_endpoint=f"tcp://10.0.0.2:{port}")
            for port in (4001, 4002)
        ]
        assert await links.admit(generators[0]) == 1
        with pytest.raises(ConfigError, match="the same id"):
            await links.admit(generators[1])
        await links.report(1, 1, {"kind": "left"})
        await events.has_left.wait()

        assert await links.admit(generators[1]) == 2
        assert links.supervisor_at("pod-7").ref == generators[1].supervisor
        assert links.find_generator("pod-7") == 2
        links.start_over()
