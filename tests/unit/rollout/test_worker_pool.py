"""Which jobs a worker gets, and when."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import ActorDied, ConnectionLost, UmbraError
from umbra.runtime.rollout.agents.worker_pool import GroupRetries, WorkerJob, WorkerPool
from umbra.runtime.rollout.rollout_config import DispatchConfig, RolloutConfig, RolloutSettings
from umbra.runtime.rpc.envelopes import ActorRef


class LostWorker:
    """Context of a manager whose worker is lost in its first call, and back when the test allows.

    Attributes:
        calls: the first argument of each.
    """

    def __init__(self) -> None:
        self.is_back = asyncio.Event()
        self.is_awaited = asyncio.Event()
        self.is_lost = asyncio.Event()
        self.calls: list[object] = []
        self.ref = self._incarnation(1)

    @property
    def client(self) -> Any:
        return self

    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int) -> ActorRef:
        if self.calls:
            self.is_awaited.set()
            async with asyncio.timeout(timeout_s):
                await self.is_back.wait()
            self.ref, self.is_lost = self._incarnation(2), asyncio.Event()
        return self.ref

    def handle(self, ref: ActorRef) -> Any:
        return self

    def drop(self, ref: ActorRef, reason: str) -> None:
        self.is_lost.set()

    async def connect(self, timeout_s: float) -> asyncio.Event:
        return self.is_lost

    async def call(self, method: str, *arguments: object, timeout_s: float) -> None:
        self.calls.append(arguments[0])
        if len(self.calls) == 1:
            self.is_lost.set()
            raise ConnectionLost("its process ended")

    def _incarnation(self, number: int) -> ActorRef:
        return ActorRef(
            name="worker-0", incarnation=number, node_id="node", ipc_endpoint="ipc:///nowhere"
        )


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


def test_a_job_that_nobody_wants_any_more_does_not_run_when_its_worker_is_back() -> None:
    """Its arguments open a session, whose records would follow the end of its group."""

    async def main() -> list[object]:
        context, wanted, done = LostWorker(), {"first"}, asyncio.Event()

        pool = WorkerPool(
            pool_config(1, 1, "worker-0"), cast("ActorContext", context), refuse_failure
        )
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pool.run())
            pool.put(job("first", done.set, is_active=lambda: "first" in wanted))
            await context.is_awaited.wait()
            wanted.symmetric_difference_update({"first", "second"})
            pool.put(job("second", done.set, is_active=lambda: "second" in wanted))
            context.is_back.set()
            await done.wait()
            running.cancel()
        return context.calls

    assert asyncio.run(main()) == ["first", "second"]


class DeadlyWorker:
    """Context of a manager whose worker dies three times while it runs the job "deadly".

    At the first two deaths all three jobs are running. From then on, every other job returns once
    two of them run at the same time.
    """

    def __init__(self) -> None:
        self.incarnation = 1
        self.deaths: dict[int, asyncio.Event] = defaultdict(asyncio.Event)  # by incarnation
        self.all_run = asyncio.Barrier(3)
        self.others_run = asyncio.Barrier(2)

    @property
    def client(self) -> DeadlyWorker:
        return self

    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int) -> ActorRef:
        return ActorRef(
            name=name, incarnation=self.incarnation, node_id="node", ipc_endpoint="ipc:///nowhere"
        )

    def handle(self, ref: ActorRef) -> DeadlyCalls:
        return DeadlyCalls(self, ref)

    def drop(self, ref: ActorRef, reason: str) -> None:
        self.deaths[ref.incarnation].set()


@dataclass(frozen=True)
class DeadlyCalls:
    """Calls to one incarnation of a deadly worker."""

    worker: DeadlyWorker
    ref: ActorRef

    async def connect(self, timeout_s: float) -> asyncio.Event:
        return self.worker.deaths[self.ref.incarnation]

    async def call(self, method: str, name: str, timeout_s: float) -> None:
        worker, incarnation = self.worker, self.ref.incarnation
        if incarnation <= 2:
            await worker.all_run.wait()
        elif name != "deadly":
            await worker.others_run.wait()
            return
        if name == "deadly":
            worker.incarnation += 1
            worker.deaths[incarnation].set()  # its own call is the first to be lost
        else:
            await worker.deaths[incarnation].wait()
        raise ConnectionLost("its process ended")


def test_once_a_job_is_found_that_ends_its_worker_the_others_run_side_by_side_again() -> None:
    async def main() -> tuple[list[str], set[str]]:
        failed, returned, is_done = list[str](), set[str](), asyncio.Event()

        def note_return(name: str) -> None:
            returned.add(name)
            if len(returned) == 2:
                is_done.set()

        def note_failure(name: str, error: UmbraError) -> None:
            failed.append(name)

        pool = WorkerPool(
            pool_config(3, 2, "worker-0"), cast("ActorContext", DeadlyWorker()), refuse_failure
        )
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pool.run())
            for name in ("deadly", "second", "third"):
                on_failure = partial(note_failure, name)
                pool.put(job(name, partial(note_return, name), on_failure=on_failure))
            await is_done.wait()
            running.cancel()
        return failed, returned

    assert asyncio.run(main()) == (["deadly"], {"second", "third"})


class SeveralWorkers:
    """Context of a manager with workers whose calls return when the test says so.

    Attributes:
        calls: (worker, job) in the order of the calls.
        running: by (worker, job): the future that the call waits for.
        has_failed: set when the pool has failed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.running: dict[tuple[str, str], asyncio.Future[None]] = {}
        self.changed = asyncio.Event()
        self.has_failed = asyncio.Event()
        self._gone: set[str] = set()
        self._ended: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    @property
    def client(self) -> SeveralWorkers:
        return self

    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int) -> ActorRef:
        if name in self._gone:
            raise ActorDied(f"{name} is lost, because its node was")
        return ActorRef(name=name, incarnation=1, node_id="node", ipc_endpoint="ipc:///nowhere")

    def handle(self, ref: ActorRef) -> CallsToOne:
        return CallsToOne(self, ref)

    def drop(self, ref: ActorRef, reason: str) -> None:
        self._ended[ref.name].set()

    def end_of(self, name: str) -> asyncio.Event:
        return self._ended[name]

    async def wait_for_calls(self, count: int) -> None:
        while len(self.calls) < count:
            self.changed.clear()
            await self.changed.wait()

    def lose(self, name: str) -> None:
        """Loses a worker for good."""
        self._gone.add(name)
        self._ended[name].set()
        for (worker, _), call in self.running.items():
            if worker == name:
                call.set_exception(ConnectionLost("its node is lost"))


@dataclass(frozen=True)
class CallsToOne:
    """Calls to one of several workers."""

    context: SeveralWorkers
    ref: ActorRef

    async def connect(self, timeout_s: float) -> asyncio.Event:
        return self.context.end_of(self.ref.name)

    async def call(self, method: str, name: str, timeout_s: float) -> None:
        key = (self.ref.name, name)
        self.context.running[key] = asyncio.get_running_loop().create_future()
        self.context.calls.append(key)
        self.context.changed.set()
        try:
            await self.context.running[key]
        finally:
            del self.context.running[key]


def run_with_two_workers(
    act: Callable[[SeveralWorkers, WorkerPool], Coroutine[Any, Any, None]],
) -> list[UmbraError]:
    """Runs two workers, "a" and "b", with room for three jobs each; returns the pool's failures."""
    failures: list[UmbraError] = []

    async def main() -> None:
        context = SeveralWorkers()

        def note_failure(error: UmbraError) -> None:
            failures.append(error)
            context.has_failed.set()

        pool = WorkerPool(pool_config(3, 3, "a", "b"), cast("ActorContext", context), note_failure)
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(pool.run())
            await act(context, pool)
            running.cancel()

    asyncio.run(main())
    return failures


def test_the_least_busy_worker_gets_the_next_job() -> None:
    async def act(context: SeveralWorkers, pool: WorkerPool) -> None:
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

    assert run_with_two_workers(act) == []


def test_the_jobs_of_a_worker_that_is_gone_run_elsewhere() -> None:
    async def act(context: SeveralWorkers, pool: WorkerPool) -> None:
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

    assert run_with_two_workers(act) == []


def test_the_pool_fails_when_no_worker_is_left() -> None:
    async def act(context: SeveralWorkers, pool: WorkerPool) -> None:
        pool.put(job("j0", lambda: None))
        await context.wait_for_calls(1)

        context.lose("a")
        await context.wait_for_calls(2)
        context.lose("b")
        await context.has_failed.wait()

    (failure,) = run_with_two_workers(act)
    assert "rollout worker b is gone: b is lost, because its node was" in str(failure)
