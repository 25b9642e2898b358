"""Which jobs a worker gets, and when."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import ConnectionLost, UmbraError
from umbra.runtime.rollout.agents.worker_pool import GroupRetries, WorkerJob, WorkerPool
from umbra.runtime.rpc.actor_ref import ActorRef


class LostWorker:
    """Context of a manager whose worker is lost in its first call, and back when the test allows.

    Attributes:
        calls: the first argument of each.
    """

    def __init__(self) -> None:
        self.is_back = asyncio.Event()
        self.is_awaited = asyncio.Event()
        self.calls: list[object] = []
        self.ref = self._incarnation(1)

    async def resolve(self, name: str, timeout_s: float) -> ActorRef:
        if self.calls:
            self.is_awaited.set()
            async with asyncio.timeout(timeout_s):
                await self.is_back.wait()
            self.ref = self._incarnation(2)
        return self.ref

    def connect(self, ref: ActorRef) -> Any:
        return self

    async def call(self, method: str, *arguments: object, timeout_s: float) -> None:
        self.calls.append(arguments[0])
        if len(self.calls) == 1:
            raise ConnectionLost("its process ended")

    def _incarnation(self, number: int) -> ActorRef:
        return ActorRef(
            name="worker-0", incarnation=number, node_id="node", ipc_endpoint="ipc:///nowhere"
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
            ["worker-0"],
            cast("ActorContext", context),
            concurrency={"run_agent": 1},
            max_deaths=1,
            on_failure=refuse_failure,
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

    async def resolve(self, name: str, timeout_s: float) -> ActorRef:
        return ActorRef(
            name=name, incarnation=self.incarnation, node_id="node", ipc_endpoint="ipc:///nowhere"
        )

    def connect(self, ref: ActorRef) -> DeadlyCalls:
        return DeadlyCalls(self, ref)


@dataclass(frozen=True)
class DeadlyCalls:
    """Calls to one incarnation of a deadly worker."""

    worker: DeadlyWorker
    ref: ActorRef

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
            ["worker-0"],
            cast("ActorContext", DeadlyWorker()),
            concurrency={"run_agent": 3},
            max_deaths=2,
            on_failure=refuse_failure,
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
