"""Which jobs a worker gets, and when."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import ActorDied, ConnectionLost, UmbraError
from umbra.runtime.rollout.agents.worker_pool import GroupRetries, WorkerJob, WorkerPool
from umbra.runtime.rollout.rollout_config import DispatchConfig, RolloutConfig, RolloutSettings
from umbra.runtime.rpc.wire import ActorRef


class Workers:
    """Context of a manager with workers whose calls return when the test says so.

    Attributes:
        calls: (worker, job) in the order of the calls.
        running: by (worker, job): the future that the call waits for.
        may_come_back: while it is cleared, a worker that died is not started again.
        num_awaited: how often the pool has asked for a worker.
        has_failed: set when the pool has failed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.running: dict[tuple[str, str], asyncio.Future[None]] = {}
        self.changed = asyncio.Event()
        self.may_come_back = asyncio.Event()
        self.may_come_back.set()
        self.num_awaited = 0
        self.has_failed = asyncio.Event()
        self._gone: set[str] = set()
        self._incarnations: dict[str, int] = defaultdict(lambda: 1)
        self._ended: dict[ActorRef, asyncio.Event] = defaultdict(asyncio.Event)

    @property
    def client(self) -> Workers:
        return self

    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int) -> ActorRef:
        self.num_awaited += 1
        self.changed.set()
        await self.may_come_back.wait()
        if name in self._gone:
            raise ActorDied(f"{name} is lost, because its node was")
        return self._ref(name)

    def handle(self, ref: ActorRef) -> CallsToOne:
        return CallsToOne(self, ref)

    def drop(self, ref: ActorRef, reason: str) -> None:
        self._ended[ref].set()

    def end_of(self, ref: ActorRef) -> asyncio.Event:
        return self._ended[ref]

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def wait_for_calls(self, count: int) -> None:
        await self.wait_for(lambda: len(self.calls) >= count)

    def die(self, name: str) -> None:
        """Ends the process of a worker, whose next one takes calls."""
        ref = self._ref(name)
        self._incarnations[name] += 1
        self._ended[ref].set()
        for (worker, _), call in self.running.items():
            if worker == name:
                call.set_exception(ConnectionLost("its process ended"))

    def lose(self, name: str) -> None:
        """Loses a worker for good."""
        self._gone.add(name)
        self.die(name)

    def _ref(self, name: str) -> ActorRef:
        number = self._incarnations[name]
        return ActorRef(
            name=name, incarnation=number, node_id="node", ipc_endpoint="ipc:///nowhere"
        )


@dataclass(frozen=True)
class CallsToOne:
    """Calls to one incarnation of a worker."""

    context: Workers
    ref: ActorRef

    async def connect(self, timeout_s: float) -> asyncio.Event:
        return self.context.end_of(self.ref)

    async def call(self, method: str, name: str, timeout_s: float) -> None:
        key = (self.ref.name, name)
        self.context.running[key] = asyncio.get_running_loop().create_future()
        self.context.calls.append(key)
        self.context.changed.set()
        try:
            await self.context.running[key]
        finally:
            del self.context.running[key]


def pool_config(concurrency: int, max_deaths: int, *names: str) -> RolloutConfig:
    return RolloutConfig(
        settings=RolloutSettings(agent="loops:run", agent_concurrency=concurrency),
        dispatch=DispatchConfig(pool="policy", max_context_len=8),
        prompts_path="",
        world_size=1,
        worker_names=names,
        max_worker_deaths=max_deaths,
    )


def refuse_failure(error: UmbraError) -> None:
    raise AssertionError(error)


def job(
    name: str,
    on_return: Callable[[], None],
    *,
    on_failure: Callable[[UmbraError], None] = refuse_failure,
    is_active: Callable[[], bool] = lambda: True,
) -> WorkerJob:
    return WorkerJob(
        label=name,
        group_id=name,
        sample_id=name,
        method="run_agent",
        make_arguments=lambda: (name,),
        timeout_s=5.0,
        on_result=lambda _: on_return(),
        on_failure=on_failure,
        is_active=is_active,
        group_retries=GroupRetries(0),
    )


def run_with(
    names: Sequence[str],
    act: Callable[[Workers, WorkerPool], Coroutine[Any, Any, None]],
    concurrency: int = 3,
) -> list[UmbraError]:
    """Runs these workers, with room for so many jobs each; returns the pool's failures."""
    failures: list[UmbraError] = []

    async def main() -> None:
        context = Workers()

        def note_failure(error: UmbraError) -> None:
            failures.append(error)
            context.has_failed.set()

        config = pool_config(concurrency, 2, *names)
        pool = WorkerPool(config, cast("ActorContext", context), note_failure)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pool.run())
            await act(context, pool)
            running.cancel()

    asyncio.run(main())
    return failures


def test_a_job_that_nobody_wants_any_more_does_not_run_when_its_worker_is_back() -> None:
    """Its arguments open a session, whose records would follow the end of its group."""

    async def act(context: Workers, pool: WorkerPool) -> None:
        wanted, done = {"first"}, asyncio.Event()
        pool.put(job("first", done.set, is_active=lambda: "first" in wanted))
        await context.wait_for_calls(1)
        context.may_come_back.clear()
        context.die("a")
        await context.wait_for(lambda: context.num_awaited == 2)

        wanted.symmetric_difference_update({"first", "second"})
        pool.put(job("second", done.set, is_active=lambda: "second" in wanted))
        context.may_come_back.set()
        await context.wait_for_calls(2)
        context.running["a", "second"].set_result(None)
        await done.wait()

        assert context.calls == [("a", "first"), ("a", "second")]

    assert run_with(["a"], act, concurrency=1) == []


def test_once_a_job_is_found_that_ends_its_worker_the_others_run_side_by_side_again() -> None:
    async def act(context: Workers, pool: WorkerPool) -> None:
        failed, returned = list[str](), asyncio.Queue[str]()
        for name in ("deadly", "second", "third"):
            on_return = partial(returned.put_nowait, name)
            on_failure = partial(note_failure, failed, name)
            pool.put(job(name, on_return, on_failure=on_failure))
        for num_calls in (3, 6):  # twice, all of them see their worker die
            await context.wait_for_calls(num_calls)
            context.die("a")
        await context.wait_for_calls(7)
        assert context.calls[6:] == [("a", "deadly")], "each would run alone"
        context.die("a")

        await context.wait_for_calls(9)
        for call in context.running.values():
            call.set_result(None)

        assert {await returned.get(), await returned.get()} == {"second", "third"}
        assert failed == ["deadly"]

    def note_failure(failed: list[str], name: str, error: UmbraError) -> None:
        failed.append(name)

    assert run_with(["a"], act) == []


def test_the_least_busy_worker_gets_the_next_job() -> None:
    async def act(context: Workers, pool: WorkerPool) -> None:
        for name in ("j0", "j1", "j2", "j3"):
            pool.put(job(name, lambda: None))
        await context.wait_for_calls(4)
        assert context.calls == [("a", "j0"), ("b", "j1"), ("a", "j2"), ("b", "j3")]

        context.running["b", "j1"].set_result(None)
        context.running["b", "j3"].set_result(None)
        await asyncio.sleep(0)
        for name in ("j4", "j5", "j6", "j7"):
            pool.put(job(name, lambda: None))
        await context.wait_for_calls(8)
        assert context.calls[4:] == [("b", "j4"), ("b", "j5"), ("a", "j6"), ("b", "j7")]

    assert run_with(["a", "b"], act) == []


def test_the_jobs_of_a_worker_that_is_gone_run_elsewhere() -> None:
    async def act(context: Workers, pool: WorkerPool) -> None:
        for name in ("j0", "j1", "j2"):
            pool.put(job(name, lambda: None))
        await context.wait_for_calls(3)

        context.lose("a")
        await context.wait_for_calls(5)
        assert context.calls[3:] == [("b", "j0"), ("b", "j2")]

        for call in context.running.values():
            call.set_result(None)
        pool.put(job("j3", lambda: None))  # does not wait for the one that is gone
        await context.wait_for_calls(6)
        assert context.calls[-1] == ("b", "j3")

    assert run_with(["a", "b"], act) == []


def test_the_pool_fails_when_no_worker_is_left() -> None:
    async def act(context: Workers, pool: WorkerPool) -> None:
        pool.put(job("j0", lambda: None))
        await context.wait_for_calls(1)

        context.lose("a")
        await context.wait_for_calls(2)
        context.lose("b")
        await context.has_failed.wait()

    (failure,) = run_with(["a", "b"], act)
    assert "rollout worker b is gone: b is lost, because its node was" in str(failure)
