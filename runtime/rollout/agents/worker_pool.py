"""The manager's side of the rollout actors: hands out work and outlives their deaths.

    put(job) -> queue of its method -> lanes of a worker -> call -> on_result | on_failure
                     ^                          |
                     +--------------------------+  the worker died
                queue of suspects  <------------+  again
                   |
                   +-> one at a time beside the other work, at last quite alone

A worker does many jobs at a time, and dies of one, or of none: one death proves nothing, and all
that was there runs again as before. Each that has seen two becomes a suspect; only one suspect at
a time runs on a worker, and of all suspects a death counts for that one alone. The death that would
convict it is allowed only while nothing else runs there, and before the others are tried: so a job
is never given up for what another one does. With the conviction those that were not tried go free.
Where the worker said itself which job ends it (`blame`), nobody else is suspected, and that one's
next attempt comes before other work. Where such ends follow each other, so that no job of the kind
gets done, it is not a job's fault but the function's: all of it fails.

Jobs may therefore run more than once: rewards and agent loops are repeatable by contract.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
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
_SUSPECT_FROM: Final = 2  # deaths


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
        sample_id: by which a worker blames it.
        make_arguments: called anew for each attempt.
        timeout_s: deadline of the call.
        on_failure: told of an error that another attempt would not heal.
        is_wanted: False once nobody waits for the outcome; neither is called then.
        num_deaths: of actors that it may have been the cause of.
        is_suspect: it runs beside no other suspect.
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
    is_suspect: bool = False
    retries: int = 0


class WorkerPool:
    """Keeps `concurrency` calls in progress on each rollout actor.

    Args:
        names: of the actors.
        concurrency: calls in progress per actor, per method.
        max_deaths: how many deaths of actors a job may be suspected of.
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
        self._suspects = _Suspects()
        # One at least is left for the trial beside others.
        self._suspect_from = max(1, min(_SUSPECT_FROM, max_deaths - 1))
        self._blocked = {method: BlockedInARow() for method in concurrency}

    def put(self, job: WorkerJob) -> None:
        queue = self._suspects if job.is_suspect else self._queues[job.method]
        queue.put_nowait(job)

    def blame(self, name: str, incarnation: int, sample_id: str, error: UmbraError) -> None:
        """That actor ends because of one job, which fails with `error` once the actor is gone."""
        for worker in self._workers:
            if worker.name == name:
                worker.blamed = _Blamed(incarnation, sample_id, error)

    async def run(self) -> None:
        """Lives until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                for method, count in self._concurrency.items():
                    for _ in range(count):
                        tasks.create_task(self._serve(worker, self._queues[method]))
                tasks.create_task(self._serve(worker, self._suspects))

    async def _serve(self, worker: _Worker, queue: asyncio.Queue[WorkerJob] | _Suspects) -> None:
        while True:
            try:
                await worker.connect()  # a job is taken only by a worker that is there
                job = await queue.get()
                if not job.is_wanted():
                    continue
                is_last_chance = 0 < self._max_deaths <= job.num_deaths
                async with worker.alone() if is_last_chance else worker.beside_others():
                    if job.is_wanted():
                        await self._attempt(job, worker, await worker.connect())
            except UmbraError as error:
                self._on_failure(RolloutError(f"rollout actor {worker.name} is gone: {error}"))
                return

    async def _attempt(self, job: WorkerJob, worker: _Worker, handle: Handle) -> None:
        ref = handle.ref
        if job.is_suspect:
            worker.suspect(ref.incarnation, job.sample_id)
        try:
            result = await handle.call(job.method, *job.make_arguments(), timeout_s=job.timeout_s)
        except ConnectionLost as error:
            worker.on_lost(ref)
            self._on_death(job, worker, ref, error)
        except RolloutError as error:
            self._fail(job, error)  # its text was made for the user
        except UmbraError as error:
            self._fail(job, RolloutError(f"{job.label} failed in {ref}: {error}"))
        else:
            self._blocked[job.method].on_done()
            if job.is_wanted():
                job.on_result(result)

    def _on_death(self, job: WorkerJob, worker: _Worker, ref: ActorRef, error: UmbraError) -> None:
        blamed = worker.blamed_for(ref.incarnation)
        if blamed is not None and blamed.error is not None:
            if blamed.sample_id == job.sample_id:
                self._on_blocked(job, str(blamed.error))
            else:
                self.put(job)
            return
        if blamed is None or blamed.sample_id == job.sample_id or not job.is_suspect:
            job.num_deaths += 1
            job.is_suspect = job.is_suspect or job.num_deaths >= self._suspect_from
        if job.num_deaths <= self._max_deaths:
            logger.info("%s was lost while it did %s, which is done anew", ref, job.label)
            self.put(job)
            return
        self._free_untried()
        job.retries = 0  # it has had its chances
        self._fail(
            job,
            _error_of(
                job,
                f"{job.label} saw {job.num_deaths} rollout actors die, the last of them {ref} "
                f"({error}): it is taken for the cause. See their logs",
            ),
        )

    def _free_untried(self) -> None:
        """Suspects that may only have seen deaths which another one has been convicted of."""
        for job in self._suspects.take_all():
            if job.num_deaths == self._suspect_from:
                job.num_deaths, job.is_suspect = 0, False
            self.put(job)

    def _on_blocked(self, job: WorkerJob, reason: str) -> None:
        job.is_suspect = True  # its next attempt is the first of all
        job.retries = min(job.retries, job.group_retries.left)
        job.group_retries.left -= 1
        so_often = self._blocked[job.method].on_blocked(job.group_id)
        if so_often:
            self._on_failure(_error_of(job, f"{reason} ({so_often})"))
            return
        self._fail(job, _error_of(job, reason))

    def _fail(self, job: WorkerJob, error: UmbraError) -> None:
        if not job.is_wanted():
            return
        if job.retries > 0:
            job.retries -= 1
            logger.warning("%s failed and is tried again: %s", job.label, error)
            self.put(job)
            return
        job.on_failure(error)


def _error_of(job: WorkerJob, text: str) -> RolloutError:
    return RewardError(text) if job.method == "score" else RolloutError(text)


class _Suspects:
    """Jobs, those first of which most deaths are counted, and of these as their samples are named.

    (The order in which the calls of a dead worker fail is any.)
    """

    def __init__(self) -> None:
        self._queue: asyncio.PriorityQueue[tuple[int, str, int, WorkerJob]] = (
            asyncio.PriorityQueue()
        )
        self._serials = itertools.count()

    def put_nowait(self, job: WorkerJob) -> None:
        self._queue.put_nowait((-job.num_deaths, job.sample_id, next(self._serials), job))

    async def get(self) -> WorkerJob:
        return (await self._queue.get())[-1]

    def take_all(self) -> list[WorkerJob]:
        return [self._queue.get_nowait()[-1] for _ in range(self._queue.qsize())]


@dataclass(frozen=True, slots=True)
class _Blamed:
    """The job that a death of this incarnation counts for.

    Attributes:
        error: the actor's own word, which needs no further proof; None for a suspect.
    """

    incarnation: int
    sample_id: str
    error: UmbraError | None


class _Worker:
    """One named rollout actor, through its lives."""

    def __init__(self, name: str, context: ActorContext) -> None:
        self.name = name
        self.blamed: _Blamed | None = None
        self._num_running = 0
        self._is_reserved = False
        self._changed = asyncio.Condition()
        self._context = context
        self._handle: Handle | None = None
        self._lost_incarnation = 0
        self._resolving = asyncio.Lock()

    @asynccontextmanager
    async def beside_others(self) -> AsyncGenerator[None]:
        """Waits while a job has this worker for itself."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_reserved)
            self._num_running += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None]:
        """Waits for the jobs that run here; others wait until it is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_reserved)
            self._is_reserved = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._num_running)
            yield
        finally:
            async with self._changed:
                self._is_reserved = False
                self._changed.notify_all()

    def suspect(self, incarnation: int, sample_id: str) -> None:
        """A suspect begins; the actor's own word, where it came already, weighs more."""
        found = self.blamed_for(incarnation)
        if found is None or found.error is None:
            self.blamed = _Blamed(incarnation, sample_id, None)

    def blamed_for(self, incarnation: int) -> _Blamed | None:
        found = self.blamed
        return found if found is not None and found.incarnation == incarnation else None

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
