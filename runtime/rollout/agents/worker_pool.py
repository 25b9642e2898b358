"""The manager's side of the rollout workers: gives them jobs and survives their deaths.

    put(job) -> queue of its method -> lanes of a worker -> call -> on_result | on_failure
                     ^                          |
                     +--- first death ----------+
                                                +--- second death ---> quarantine of that worker

A worker runs many jobs at a time, and its process may die because of one of them, or of none. One
death proves nothing, so all its jobs run again as before. A job that was running at two deaths goes
into quarantine on the worker that died last. Jobs in quarantine run one at a time, and the worker
runs nothing else until all are done. A job that returns is clean. If the process keeps dying while
a job runs alone, that job is the cause: it fails, and the others leave the quarantine.

A worker that reports which job blocks it (`report_blocked`) puts that job alone into quarantine. If
such ends follow each other and no job of the kind returns in between, the function is at fault, not
a job: the whole pool fails.

Jobs may therefore run more than once: rewards and agent loops must be repeatable.
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

# How long a rollout worker may take to come back before its absence is an error. The supervisor
# enforces the worker's own start limit; this one only bounds the wait.
_RESOLVE_TIMEOUT_S: Final = 300.0
# Interval of asking for a worker whose death the supervisor has not noticed yet. It notices within
# milliseconds; shorter only loads it.
_STALE_REF_WAIT_S: Final = 0.05
_QUARANTINE_FROM: Final = 2
"""Number of deaths. With fewer, a single chance kill would make all jobs of the worker run one
after the other; with more, a job that kills its process costs more restarts."""


@dataclass(slots=True, eq=False)
class GroupRetries:
    """Retries that the jobs of a group share after one blocked; that kills all jobs beside it."""

    left: int


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerJob:
    """A call that any rollout worker may answer. It may run more than once.

    Attributes:
        label: names the job in messages.
        group_id: the group that it is for.
        sample_id: names the job in a worker's `report_blocked`.
        make_arguments: called for each attempt.
        timeout_s: deadline of the call.
        on_failure: called with an error that another attempt would not heal.
        is_active: False once the result is not needed; neither callback is called then.
        num_deaths: deaths of workers that were running it, since it last returned.
        retries: further attempts allowed after it failed by itself.
        group_retries: those of `retries` that are left after it blocked its process.
    """

    label: str
    group_id: str
    sample_id: str
    method: str
    make_arguments: Callable[[], Sequence[object]]
    timeout_s: float
    on_result: Callable[[Any], None]
    on_failure: Callable[[UmbraError], None]
    is_active: Callable[[], bool]
    group_retries: GroupRetries
    num_deaths: int = 0
    retries: int = 0


class WorkerPool:
    """Keeps `concurrency` calls in progress on each rollout worker.

    Args:
        names: of the workers' actors.
        concurrency: calls in progress per worker, by method.
        max_deaths: deaths of workers that a job may see; one more, alone, shows it is the cause.
        on_failure: called when a worker is gone for good, or user code blocks for any input.
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
        # Bounded by what the manager admits: a job per group or trajectory.
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
        """Takes a worker's report that one job blocks it; the job fails once the worker is gone."""
        for worker in self._workers:
            if worker.name == name:
                worker.blocked = _Blocked(incarnation, sample_id, error)

    async def run(self) -> None:
        """Runs until cancelled."""
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
            self._on_failure(RolloutError(f"rollout worker {worker.name} is gone: {error}"))

    async def _serve(self, worker: _Worker, queue: asyncio.Queue[WorkerJob]) -> None:
        while True:
            await worker.await_end_of_quarantine()
            await worker.connect()  # jobs are taken only for a worker that is up
            job = await queue.get()
            if worker.quarantine:
                self.put(job)  # another worker may have time for it
                continue
            async with worker.running_job():
                if await self._attempt(job, worker):
                    worker.quarantine.append(job)

    async def _serve_quarantine(self, worker: _Worker) -> None:
        while True:
            job = await worker.next_in_quarantine()
            while await self._attempt(job, worker):
                pass
            await worker.leave_quarantine(job)

    async def _attempt(self, job: WorkerJob, worker: _Worker) -> bool:
        """Runs the job; returns whether it must run again, alone."""
        handle = await worker.connect()
        if not job.is_active():  # checked after the wait: its group may have ended meanwhile
            return False
        ref = handle.ref
        try:
            result = await handle.call(job.method, *job.make_arguments(), timeout_s=job.timeout_s)
        except ConnectionLost as error:
            worker.on_lost(ref)
            return self._on_death(job, worker, ref, error)
        except RolloutError as error:
            job.num_deaths = 0
            self._fail(job, error)  # its message is written for the user
        except UmbraError as error:
            job.num_deaths = 0
            self._fail(job, RolloutError(f"{job.label} failed in {ref}: {error}"))
        else:
            self._blocked[job.method].on_done()
            if job.is_active():
                job.on_result(result)
        return False

    def _on_death(self, job: WorkerJob, worker: _Worker, ref: ActorRef, error: UmbraError) -> bool:
        """Handles a death of the job's worker; returns whether it must run again, alone."""
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
        """Fails the job; the others in quarantine run again normally, since it was the cause."""
        for other in worker.quarantine[1:]:
            other.num_deaths = 0
            self.put(other)
        del worker.quarantine[1:]
        job.retries = 0  # it was tried often enough
        self._fail(
            job,
            _error_of(
                job,
                f"{job.label} saw {job.num_deaths} rollout workers die, the last of them {ref} "
                f"({error}): it is considered the cause. See their logs",
            ),
        )

    def _on_blocked(self, job: WorkerJob, reason: str) -> bool:
        """Handles a blocked worker; returns whether the job must run again, alone."""
        job.retries = min(job.retries, job.group_retries.left)
        job.group_retries.left -= 1
        if too_often := self._blocked[job.method].on_blocked(job.group_id):
            self._on_failure(_error_of(job, f"{reason} ({too_often})"))
            return False
        return self._retry_or_fail(job, _error_of(job, reason))

    def _fail(self, job: WorkerJob, error: UmbraError) -> None:
        if self._retry_or_fail(job, error):
            self.put(job)

    def _retry_or_fail(self, job: WorkerJob, error: UmbraError) -> bool:
        """Takes a retry and returns True, or reports the failure and returns False."""
        if job.is_active() and job.retries > 0:
            job.retries -= 1
            logger.warning("%s failed and is retried: %s", job.label, error)
            return True
        if job.is_active():
            job.on_failure(error)
        return False


def _error_of(job: WorkerJob, text: str) -> RolloutError:
    return RewardError(text) if job.method == "score" else RolloutError(text)


@dataclass(frozen=True, slots=True)
class _Blocked:
    """A worker's report of why it ends: the sample whose job blocks it, and the job's error."""

    incarnation: int
    sample_id: str
    error: UmbraError


class _Worker:
    """One named rollout worker, across its incarnations.

    Attributes:
        quarantine: jobs that run alone here, in this order.
        blocked: the worker's last report.
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
    async def running_job(self) -> AsyncGenerator[None]:
        """Counts a job that is not in quarantine as running; at its end it may enter it."""
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
        """Disconnects a dead incarnation; `connect` waits for the next one."""
        self._lost_incarnation = max(self._lost_incarnation, ref.incarnation)
        if self._handle is not None and self._handle.ref.incarnation <= ref.incarnation:
            self._handle = None

    async def connect(self) -> Handle:
        """A handle to the live incarnation, once there is one.

        Raises:
            UmbraError: the worker will not come back, or not in time.
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
            # The supervisor has not noticed the death yet.
            await asyncio.sleep(_STALE_REF_WAIT_S)
