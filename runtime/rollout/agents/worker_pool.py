"""The manager's side of the rollout actors: gives them work and outlives their deaths.

    put(job) -> queue of its method -> lanes of a worker -> call -> on_result | on_failure
                     ^                          |
                     +--- first death ----------+
                                                +--- second death ---> quarantine of that worker

A worker does many jobs at a time, and its process fails because of one of them, or of none. One
death proves nothing, so all that ran there runs again as before. A job that was there at two deaths
goes into quarantine on the worker that died last, which has nothing else to do by then: jobs in
quarantine run one at a time, and nothing else runs on that worker until all are through. A job that
returns is clean. One whose process fails again and again while it runs alone is the cause: it
fails, and the others leave the quarantine.

A worker that reports itself which job blocks it (`report_blocked`) puts that job alone into
quarantine. Where such ends follow each other, so that no job of the kind gets done, it is not a
job's fault but the function's: all of it fails.

Jobs may therefore run more than once: rewards and agent loops are repeatable by contract.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import (
    ConnectionLost,
    DeadlineExceeded,
    RewardError,
    RolloutError,
    UmbraError,
)
from umbra.runtime.rollout.agents.blocked_in_a_row import BlockedInARow
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_client import Handle

logger = logging.getLogger(__name__)

# How long a rollout actor may take to come back before its absence is an error. Its own start
# limit is the supervisor's business; this one only bounds the wait.
_RESOLVE_TIMEOUT_S: Final = 300.0
# Between two looks at a worker whose death the supervisor has not noticed yet. It takes a few
# milliseconds; asking faster only burns its time.
_STALE_REF_WAIT_S: Final = 0.05
_QUARANTINE_FROM: Final = 2
"""Deaths. With fewer, a single chance kill would have all that ran there run one after the other;
with more, a job that kills its process costs more restarts."""


@dataclass(slots=True, eq=False)
class GroupRetries:
    """What a group's jobs have left together after one blocked: it costs all that ran beside it."""

    left: int


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerJob:
    """A call for any rollout actor to answer. It may run more than once.

    Attributes:
        label: what it is, for messages.
        group_id: whose it is.
        sample_id: by which a worker names it.
        make_arguments: called anew for each attempt.
        timeout_s: deadline of the call.
        on_failure: told of an error that another attempt would not heal.
        is_wanted: False once nobody waits for the outcome; neither is called then.
        num_deaths: of actors that it was running on, since it last returned.
        retries: how often it may be tried again after it failed by itself,
        group_retries: and of these, after it blocked its process.
    """

    label: str
    group_id: str
    sample_id: str
    method: str
    make_arguments: Callable[[], Sequence[object]]
    timeout_s: float
    on_result: Callable[[Any], None]
    on_failure: Callable[[UmbraError], None]
    is_wanted: Callable[[], bool]
    group_retries: GroupRetries
    num_deaths: int = 0
    retries: int = 0


class WorkerPool:
    """Keeps `concurrency` calls in progress on each rollout actor.

    Args:
        names: of the actors.
        concurrency: calls in progress per actor, per method.
        max_deaths: how many deaths of actors a job may see; with one more, alone, it is the cause.
        on_failure: told when an actor is gone for good, or the function blocks whatever it is
            given.
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
        self._queues: dict[str, asyncio.Queue[WorkerJob]] = {
            method: asyncio.Queue() for method in concurrency
        }
        self._quarantine_from = min(_QUARANTINE_FROM, max_deaths)
        self._blocked = {method: BlockedInARow() for method in concurrency}

    def put(self, job: WorkerJob) -> None:
        self._queues[job.method].put_nowait(job)

    def report_blocked(
        self, name: str, incarnation: int, sample_id: str, error: UmbraError
    ) -> None:
        """That actor ends because of one job, which fails with `error` once the actor is gone."""
        for worker in self._workers:
            if worker.name == name:
                worker.blocked = _Blocked(incarnation, sample_id, error)

    async def run(self) -> None:
        """Lives until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                lanes = [self._serve_quarantine(worker)]
                for method, count in self._concurrency.items():
                    lanes += [self._serve(worker, self._queues[method]) for _ in range(count)]
                for lane in lanes:
                    tasks.create_task(self._until_gone(worker, lane))

    async def _until_gone(self, worker: _Worker, lane: Coroutine[Any, Any, None]) -> None:
        try:
            await lane
        except UmbraError as error:
            self._on_failure(RolloutError(f"rollout actor {worker.name} is gone: {error}"))

    async def _serve(self, worker: _Worker, queue: asyncio.Queue[WorkerJob]) -> None:
        while True:
            await worker.await_end_of_quarantine()
            await worker.connect()  # a job is taken only by a worker that is there
            job = await queue.get()
            if worker.quarantine:
                self.put(job)  # another worker may have time for it
                continue
            async with worker.beside_others():
                if await self._attempt(job, worker):
                    worker.quarantine.append(job)

    async def _serve_quarantine(self, worker: _Worker) -> None:
        while True:
            job = await worker.next_in_quarantine()
            while await self._attempt(job, worker):
                pass
            await worker.leave_quarantine(job)

    async def _attempt(self, job: WorkerJob, worker: _Worker) -> bool:
        """Runs the job; whether it has to run again, alone."""
        handle = await worker.connect()
        if not job.is_wanted():  # asked after the wait: its group may have ended meanwhile
            return False
        ref = handle.ref
        try:
            result = await handle.call(job.method, *job.make_arguments(), timeout_s=job.timeout_s)
        except ConnectionLost as error:
            worker.on_lost(ref)
            return self._on_death(job, worker, ref, error)
        except RolloutError as error:
            job.num_deaths = 0
            self._fail(job, error)  # its text was made for the user
        except UmbraError as error:
            job.num_deaths = 0
            self._fail(job, RolloutError(f"{job.label} failed in {ref}: {error}"))
        else:
            self._blocked[job.method].on_done()
            if job.is_wanted():
                job.on_result(result)
        return False

    def _on_death(self, job: WorkerJob, worker: _Worker, ref: ActorRef, error: UmbraError) -> bool:
        """Whether the job has to run again, alone."""
        blocked = worker.blocked
        if blocked is None or blocked.incarnation != ref.incarnation:
            job.num_deaths += 1
        elif blocked.sample_id == job.sample_id:
            return self._on_blocked(job, str(blocked.error))
        if job.num_deaths > self._max_deaths:
            self._fail_as_cause(job, worker, ref, error)
            return False
        logger.info("%s was lost while it ran %s, which runs again", ref, job.label)
        if job.num_deaths >= self._quarantine_from:
            return True
        self.put(job)
        return False

    def _fail_as_cause(
        self, job: WorkerJob, worker: _Worker, ref: ActorRef, error: UmbraError
    ) -> None:
        """The others in quarantine may only have seen deaths that this job is the cause of."""
        for other in worker.quarantine[1:]:
            other.num_deaths = 0
            self.put(other)
        del worker.quarantine[1:]
        job.retries = 0  # it has had its chances
        self._fail(
            job,
            _error_of(
                job,
                f"{job.label} saw {job.num_deaths} rollout actors die, the last of them {ref} "
                f"({error}): it is taken for the cause. See their logs",
            ),
        )

    def _on_blocked(self, job: WorkerJob, reason: str) -> bool:
        """Whether the job has to run again, alone."""
        job.retries = min(job.retries, job.group_retries.left)
        job.group_retries.left -= 1
        if so_often := self._blocked[job.method].on_blocked(job.group_id):
            self._on_failure(_error_of(job, f"{reason} ({so_often})"))
            return False
        return self._is_tried_again(job, _error_of(job, reason))

    def _fail(self, job: WorkerJob, error: UmbraError) -> None:
        if self._is_tried_again(job, error):
            self.put(job)

    def _is_tried_again(self, job: WorkerJob, error: UmbraError) -> bool:
        """Where not, and somebody waits for it, it has failed."""
        if job.is_wanted() and job.retries > 0:
            job.retries -= 1
            logger.warning("%s failed and is tried again: %s", job.label, error)
            return True
        if job.is_wanted():
            job.on_failure(error)
        return False


def _error_of(job: WorkerJob, text: str) -> RolloutError:
    return RewardError(text) if job.method == "score" else RolloutError(text)


@dataclass(frozen=True, slots=True)
class _Blocked:
    """An actor's report of why it ends: the sample whose job blocks it, and the job's error."""

    incarnation: int
    sample_id: str
    error: UmbraError


class _Worker:
    """One named rollout actor, through its incarnations.

    Attributes:
        quarantine: jobs that run alone here, in this order.
        blocked: the last report of the actor.
    """

    def __init__(self, name: str, context: ActorContext) -> None:
        self.name = name
        self.quarantine: list[WorkerJob] = []
        self.blocked: _Blocked | None = None
        self._num_running = 0
        self._changed = asyncio.Condition()
        self._context = context
        self._handle: Handle | None = None
        self._lost_incarnation = 0
        self._resolving = asyncio.Lock()

    @asynccontextmanager
    async def beside_others(self) -> AsyncGenerator[None]:
        """For a job that is not in quarantine; at its end it may be."""
        self._num_running += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    async def await_end_of_quarantine(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.quarantine)

    async def next_in_quarantine(self) -> WorkerJob:
        """The first job in quarantine, once there is one and nothing else runs here."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.quarantine and not self._num_running)
        return self.quarantine[0]

    async def leave_quarantine(self, job: WorkerJob) -> None:
        async with self._changed:
            self.quarantine.remove(job)
            self._changed.notify_all()

    def on_lost(self, ref: ActorRef) -> None:
        """That incarnation is gone: this worker gets nothing more until the next one is up."""
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
