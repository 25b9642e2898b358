"""What an engine of a pool is asked, in which state, and what its actor hears about memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from async_tests import on_a_loop
from local_actors import lone_node

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.remote_actor import RemoteActor
from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.engine_api.lifecycle import ALL_TAGS, Tag
from umbra.runtime.errors import EngineUnhealthy, IllegalTransition, WakeError
from umbra.runtime.pools.pool_engine import PoolEngine
from umbra.runtime.rpc.rpc_client import Client
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.rpc.wire import ActorRef

WEIGHTS: frozenset[Tag] = frozenset({"weights"})
CACHE: frozenset[Tag] = frozenset({"kv_cache"})
LIMIT_S = 30.0


class Asked:
    """Grants each request, but for one whose error is in `errors`. Notes it with the state in which
    the pool has its engine meanwhile, and whether that counts as holding no memory."""

    pool_engine: PoolEngine

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []
        self.errors: dict[str, Exception] = {}
        self.is_counting, self.may_count = asyncio.Event(), asyncio.Event()

    def _note(self, *request: object) -> None:
        engine = self.pool_engine
        self.heard.append((*request, str(engine.lifecycle), engine.takes_no_memory))
        if error := self.errors.pop(str(request[0]), None):
            raise error

    def pause(self, mode: str) -> None:
        self._note("pause", mode)

    def resume(self) -> None:
        self._note("resume")

    def sleep(self, level: int, tags: list[str]) -> None:
        self._note("sleep", level, tags)

    def wake(self, tags: list[str]) -> None:
        self._note("wake", tags)

    def prepare_update(self, *layout: object) -> None:
        self._note("prepare_update", *layout)

    def load(self) -> dict[str, int]:
        self._note("load")
        return {"nbytes": 5}

    def commit_update(self) -> None:
        self._note("commit_update")

    def abort_update(self) -> None:
        self._note("abort_update")

    async def stats(self) -> dict[str, int]:
        self._note("stats")
        self.is_counting.set()
        await self.may_count.wait()
        return {"running": 2, "waiting": 3}


class Pooled:
    """An engine of a pool that is `asked`, its actor, and the states that were reported."""

    def __init__(self, asked: Asked, client: Client, ref: ActorRef, *, loads_weights: bool) -> None:
        spec = ActorSpec(name="policy-0", target="module:Engine", role="engine")
        there = client.handle(ref)
        self.actor = RemoteActor(spec, there, 1, asyncio.Event(), lambda _: None)
        self.states: list[str] = []
        self.engine = asked.pool_engine = PoolEngine(
            self.actor,
            client,
            lambda engine: self.states.append(str(engine.lifecycle)),
            loads_weights=loads_weights,
        )
        self.actor.state, self.actor.ref, self.actor.has_process = ActorState.RUNNING, ref, True
        self.actor.incarnation = 1
        self.engine.follow_actor()

    def commands(self) -> list[object]:
        """Takes those to the actor."""
        queue = self.actor._commands  # pyright: ignore[reportPrivateUsage]
        return [queue.get_nowait() for _ in range(queue.qsize())]


def test_an_engine_is_connected_before_the_first_call_to_it(tmp_path: Path) -> None:
    async def run() -> None:
        endpoint = f"ipc://{tmp_path}/engine"
        ref = ActorRef(name="policy-0", incarnation=1, node_id="n", ipc_endpoint=endpoint)
        with node.sockets.socket(zmq.ROUTER) as listener:
            listener.bind(endpoint)
            async with node.client:
                Pooled(Asked(), node.client, ref, loads_weights=False)

                assert await asyncio.to_thread(listener.poll, 5000), "nobody has connected"

    with lone_node(tmp_path) as node:
        asyncio.run(run())


@asynccontextmanager
async def pooled(
    folder: Path, *, loads_weights: bool = False
) -> AsyncGenerator[tuple[Asked, Pooled]]:
    asked = Asked()
    server = ActorServer([asked], 1)
    with lone_node(folder) as node, node.sockets.socket(zmq.ROUTER) as address:
        endpoint = server.bind(address, f"ipc://{folder}/policy-0")
        ref = ActorRef(name="policy-0", incarnation=1, node_id="n", ipc_endpoint=endpoint)
        async with asyncio.timeout(LIMIT_S), node.client, asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.run())
            yield asked, Pooled(asked, node.client, ref, loads_weights=loads_weights)
            serving.cancel()


WALK: list[tuple[str, tuple[Any, ...], tuple[object, ...], str]] = [
    # request, its arguments, what the engine hears in which state, the state afterwards
    ("prepare_update", (7, b"m", {}), (7, b"m", {}, "PENDING_WEIGHTS", False), "PENDING_WEIGHTS"),
    ("abort_update", (), ("PENDING_WEIGHTS", False), "PENDING_WEIGHTS"),
    ("load", (7,), ("UPDATING(7)", False), "UPDATING(7)"),
    ("abort_update", (), ("PENDING_WEIGHTS", False), "PENDING_WEIGHTS"),
    ("load", (7,), ("UPDATING(7)", False), "UPDATING(7)"),
    ("commit_update", (7,), ("UPDATING(7)", False), "SERVING(7)"),
    ("resume", (), (), "SERVING(7)"),
    ("wake", (ALL_TAGS,), (), "SERVING(7)"),
    ("pause", ("keep",), ("keep", "PAUSED(7)", False), "PAUSED(7)"),
    ("pause", ("keep",), (), "PAUSED(7)"),
    ("abort_update", (), ("PAUSED(7)", False), "PAUSED(7)"),
    ("sleep", (1, ALL_TAGS), (1, ["kv_cache", "weights"], "ASLEEP(1)", False), "ASLEEP(1)"),
    ("wake", (WEIGHTS,), (["weights"], "WAKING(weights)", False), "PAUSED(7)"),
    ("wake", (ALL_TAGS,), (["kv_cache"], "WAKING(kv_cache)", False), "PAUSED(7)"),
    ("resume", (), ("PAUSED(7)", False), "SERVING(7)"),
    ("pause", ("abort",), ("abort", "PAUSED(7)", False), "PAUSED(7)"),
    ("sleep", (2, CACHE), (2, ["kv_cache"], "PAUSED(7)", False), "PAUSED(7)"),
    ("sleep", (2, ALL_TAGS), (2, ["kv_cache", "weights"], "ASLEEP(2)", False), "ASLEEP(2)"),
    ("load", (8,), ("UPDATING(8)", False), "UPDATING(8)"),
    ("commit_update", (8,), ("UPDATING(8)", False), "SERVING(8)"),
]


@on_a_loop
async def test_each_request_is_made_once_in_its_state(tmp_path: Path) -> None:
    async with pooled(tmp_path) as (asked, pool):
        engine, woke_after = pool.engine, list[str]()
        for method, arguments, heard, state in WALK:
            before, begun_at = str(engine.state), time.monotonic()
            pool.states.clear()
            await getattr(engine, method)(*arguments, timeout_s=LIMIT_S)

            row = method, arguments
            assert asked.heard == ([(method, *heard)] if heard else []), row
            assert str(engine.lifecycle) == state, row
            assert engine.takes_no_memory == state.startswith("ASLEEP"), row
            took_s, age_s, now = time.monotonic() - begun_at, engine.state_age_s, time.monotonic()
            if all(reported.startswith(before) for reported in pool.states):
                assert age_s >= took_s, row
            else:
                assert age_s <= now - begun_at, row
            asked.heard.clear()
            woke_after += [method for command in pool.commands() if command == ("woke", "policy-0")]

        assert woke_after == ["wake", "commit_update"]
        asked.may_count.set()
        assert await engine.count_requests(LIMIT_S) == (2, 3)


@on_a_loop
async def test_an_illegal_request_does_not_reach_the_engine(tmp_path: Path) -> None:
    async with pooled(tmp_path) as (asked, pool):
        with pytest.raises(IllegalTransition, match="resume is not allowed in state PENDING"):
            await pool.engine.resume(LIMIT_S)
        await pool.engine.load(7, LIMIT_S)
        with pytest.raises(IllegalTransition, match="cannot commit version 8"):
            await pool.engine.commit_update(8, LIMIT_S)

        assert [request[0] for request in asked.heard] == ["load"]


@on_a_loop
async def test_an_engine_that_loads_weights_serves_version_0_in_each_incarnation(
    tmp_path: Path,
) -> None:
    async with pooled(tmp_path, loads_weights=True) as (asked, pool):
        engine, actor = pool.engine, pool.actor
        serving = engine.describe()
        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(engine.count_requests(2 * LIMIT_S))
            await asked.is_counting.wait()
            actor.state, actor.has_process, ref = ActorState.FAILED, False, actor.ref
            actor.ref = None
            engine.follow_actor()
        assert counting.result() is None, "the connection was dropped"
        ended = engine.describe()
        with pytest.raises(EngineUnhealthy, match=r"policy-0#1 is not running"):
            await engine.abort_update(LIMIT_S)
        assert await engine.count_requests(LIMIT_S) is None
        assert (engine.node_id, engine.takes_no_memory) == ("", True)
        actor.state, actor.has_process = ActorState.STARTING, True
        assert (engine.is_starting, engine.takes_no_memory) == (True, False)
        actor.state, actor.ref = ActorState.RUNNING, ref
        engine.follow_actor()
        assert (engine.is_starting, engine.node_id) == (False, "n")
        await engine.pause("keep", LIMIT_S)
        for _ in range(2):
            engine.invalidate()

    assert serving == {
        "engine": "policy-0",
        "incarnation": 1,
        "state": "SERVING",
        "version": 0,
        "ref": ref,
        "num_restarts": 0,
        "has_ended": False,
    }
    assert ended == serving | {"state": "DEAD", "version": None, "ref": None, "has_ended": True}
    states = "SERVING(0) DEAD STARTING SERVING(0) PAUSED(0) PENDING_WEIGHTS"
    assert pool.states == states.split()


@pytest.mark.parametrize(
    ("error", "raised", "heard"),
    [
        (WakeError("out of memory"), WakeError, [("failed_to_wake", "policy-0")]),
        (ValueError("no"), EngineUnhealthy, []),
    ],
)
@on_a_loop
async def test_the_actor_hears_that_its_engine_got_no_memory(
    tmp_path: Path, error: Exception, raised: type[Exception], heard: list[object]
) -> None:
    async with pooled(tmp_path, loads_weights=True) as (asked, pool):
        engine = pool.engine
        await engine.pause("keep", LIMIT_S)
        for is_asleep in (False, True):
            if is_asleep:
                await engine.sleep(1, CACHE, LIMIT_S)
            asked.errors["resume" if not is_asleep else "wake"] = error
            with pytest.raises(raised, match=f"policy-0#1 failed at .*{error}"):
                await (engine.wake(ALL_TAGS, LIMIT_S) if is_asleep else engine.resume(LIMIT_S))

            assert pool.commands() == (heard if is_asleep else []), "only memory that slept"
        assert pool.states[-1] == "WAKING(kv_cache)"


@on_a_loop
async def test_an_engine_is_killed_once_and_not_while_it_is_stopped(tmp_path: Path) -> None:
    async with pooled(tmp_path) as (_, pool):
        pool.engine.kill("it hangs")
        pool.actor.stop()
        pool.engine.kill("again")

        assert pool.commands() == [("kill", "policy-0", 1, "it hangs"), ("stop", "policy-0")]
