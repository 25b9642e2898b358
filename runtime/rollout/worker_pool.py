"""The manager's side of the rollout actors: hands out work and outlives their deaths.

    put(job) -> queue -> lane of a worker -> call -> on_result | on_failure
                  ^            |
                  +------------+  the worker died: the job goes to another one, or to its
                                  next life, up to `max_deaths` times

Jobs may therefore run more than once: rewards and agent loops are repeatable by contract.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.actor import ActorContext
from umbra.runtime.errors import (
    ConnectionLost,
    DeadlineExceeded,
    RewardError,
    RolloutError,
    UmbraError,
)
from umbra.runtime.rpc.client import Handle
from umbra.runtime.rpc.ref import ActorRef

logger = logging.getLogger(__name__)

# How long a rollout actor may take to come back before its absence is an error. Its own start
# limit is the supervisor's business; this one only bounds the wait.
_RESOLVE_TIMEOUT_S: Final = 300.0
# Between two looks at a worker whose death the supervisor has not noticed yet. It takes a few
# milliseconds; asking faster only burns its time.
_STALE_REF_WAIT_S: Final = 0.05


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A call for any rollout actor to answer. It may run more than once.

    Attributes:
        label: what it is, for messages.
        make_arguments: called anew for each attempt.
        timeout_s: deadline of the call.
        on_failure: told of an error that another attempt would not heal.
        is_wanted: False once nobody waits for the outcome; neither is called then.
        num_deaths: of actors that were doing it.
        retries: how often it may be tried again after it failed by itself.
    """

    label: str
    method: str
    make_arguments: Callable[[], Sequence[object]]
    timeout_s: float
    on_result: Callable[[Any], None]
    on_failure: Callable[[UmbraError], None]
    is_wanted: Callable[[], bool]
    num_deaths: int = 0
    retries: int = 0


class WorkerPool:
    """Keeps `concurrency` calls in progress on each rollout actor.

    Args:
        names: of the actors.
        concurrency: calls in progress per actor, per method.
        max_deaths: how many deaths of actors a job may see.
        on_failure: told when an actor is gone for good.
    """

    def __init__(
        self,
        names: Sequence[str],
        context: ActorContext,
        *,
        concurrency: dict[str, int],
        max_deaths: int,
        on_failure: Callable[[UmbraError], None],
    ) -> None:
        self._workers = [_Worker(name, context) for name in names]
        self._concurrency = concurrency
        self._max_deaths = max_deaths
        self._on_failure = on_failure
        # unbounded, yet no longer than what the manager admits: a job per group or trajectory
        self._queues: dict[str, asyncio.Queue[Job]] = {
            method: asyncio.Queue() for method in concurrency
        }

    def put(self, job: Job) -> None:
        self._queues[job.method].put_nowait(job)

    async def run(self) -> None:
        """Lives until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                for method, count in self._concurrency.items():
                    for _ in range(count):
                        tasks.create_task(self._serve(worker, self._queues[method]))

    async def _serve(self, worker: _Worker, queue: asyncio.Queue[Job]) -> None:
        while True:
            try:
                handle = await worker.connect()
            except UmbraError as error:
                self._on_failure(RolloutError(f"rollout actor {worker.name} is gone: {error}"))
                return
            job = await queue.get()
            if job.is_wanted():
                await self._attempt(job, worker, handle)

    async def _attempt(self, job: Job, worker: _Worker, handle: Handle) -> None:
        ref = handle.ref
        try:
            result = await handle.call(job.method, *job.make_arguments(), timeout_s=job.timeout_s)
        except ConnectionLost as error:
            worker.on_lost(ref)
            self._on_death(job, ref, error)
        except RolloutError as error:
            self._fail(job, error)  # its text was made for the user
        except UmbraError as error:
            self._fail(job, RolloutError(f"{job.label} failed in {ref}: {error}"))
        else:
            if job.is_wanted():
                job.on_result(result)

    def _on_death(self, job: Job, ref: ActorRef, error: UmbraError) -> None:
        job.num_deaths += 1
        if job.num_deaths <= self._max_deaths:
            logger.info("%s was lost while it did %s, which is done anew", ref, job.label)
            self.put(job)
            return
        kind = RewardError if job.method == "score" else RolloutError
        self._fail(
            job,
            kind(
                f"{job.label} saw {job.num_deaths} rollout actors die, the last of them {ref} "
                f"({error}): it is taken for the cause. See their logs"
            ),
        )

    def _fail(self, job: Job, error: UmbraError) -> None:
        if not job.is_wanted():
            return
        if job.retries > 0:
            job.retries -= 1
            logger.warning("%s failed and is tried again: %s", job.label, error)
            self.put(job)
            return
        job.on_failure(error)


class _Worker:
    """One named rollout actor, through its lives."""

    def __init__(self, name: str, context: ActorContext) -> None:
        self.name = name
        self._context = context
        self._handle: Handle | None = None
        self._lost_incarnation = 0
        self._resolving = asyncio.Lock()

    def on_lost(self, ref: ActorRef) -> None:
        """That life has ended: nothing more is given to this worker until the next one is up."""
        self._lost_incarnation = max(self._lost_incarnation, ref.incarnation)
        if self._handle is not None and self._handle.ref.incarnation <= ref.incarnation:
            self._handle = None

    async def connect(self) -> Handle:
        """A handle to the live incarnation, once there is one.

        Raises:
            UmbraError: it will not come back, or not in time.
        """
        async with self._resolving:
            if self._handle is None:
                self._handle = self._context.connect(await self._resolve())
            return self._handle

    async def _resolve(self) -> ActorRef:
        deadline = asyncio.get_running_loop().time() + _RESOLVE_TIMEOUT_S
        while True:
            ref = await self._context.resolve(self.name, _RESOLVE_TIMEOUT_S)
            if ref.incarnation > self._lost_incarnation:
                return ref
            if asyncio.get_running_loop().time() > deadline:
                raise DeadlineExceeded(f"{ref} was lost and has no successor yet")
            # the supervisor has not noticed the death yet
            await asyncio.sleep(_STALE_REF_WAIT_S)
