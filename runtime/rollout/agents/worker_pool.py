"""The manager's side of the rollout workers: gives them jobs and survives their deaths.

    put(job) -> queue of its method -> least busy worker -> call -> on_result | on_failure
                     ^                          |
                     +--- first death ----------+
                                                +--- second death ---> quarantine of that worker

A worker runs many jobs at a time, so one death proves nothing: all its jobs run again as before. A
job that was running at two deaths goes into quarantine on the worker that died last. Jobs in
quarantine run one at a time, and the worker runs nothing else until all are done. A job that
returns is clean; one that keeps killing the process while it runs alone is the cause: it fails, and
the others leave the quarantine.

A worker that reports which job blocks it (`report_blocked`) puts that job alone into quarantine. If
such reports follow each other and no job of the kind returns in between, the function is at fault:
the whole pool fails.

A worker that does not come back leaves its jobs to the others; the pool fails when none is left.
Jobs may run more than once: rewards and agent loops must be repeatable.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import (
    ConnectionLost,
    RewardError,
    RolloutError,
    TransportError,
    UmbraError,
)
from umbra.runtime.rollout.rollout_config import RolloutConfig
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.rpc.wire import ActorRef

logger = logging.getLogger(__name__)

# How long a rollout worker may take to come back; the supervisor enforces its own start limit.
_RESOLVE_TIMEOUT_S: Final = 300.0
# How long a connection to a live worker may take; another attempt follows.
_CONNECT_TIMEOUT_S: Final = 10.0
_NO_ROOM: Final = sys.maxsize
_QUARANTINE_FROM: Final = 2
"""Number of deaths. Fewer: a chance kill makes all jobs run one by one. More: more restarts."""

_MAX_PROMPTS: Final = 3
"""Larger costs more: each prompt takes `rollout.block_limit_s` and a restart of the process, twice
if it is retried. Smaller ends a run when a few bad prompts happen to come together."""


@dataclass(slots=True, eq=False)
class GroupRetries:
    """Retries that the jobs of a group share after one blocked, which kills all jobs beside it."""

    left: int


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerJob:
    """A call that any rollout worker may answer. It may run more than once."""

    label: str
    group_id: str
    sample_id: str  # names the job in a worker's `report_blocked`
    method: str
    make_arguments: Callable[[], Sequence[object]]  # called for each attempt
    timeout_s: float
    on_result: Callable[[Any], None]
    on_failure: Callable[[UmbraError], None]  # for an error that another attempt would not heal
    is_active: Callable[[], bool]  # False: the result is not needed, nor a callback
    group_retries: GroupRetries  # those of `retries` that are left after it blocked its process
    num_deaths: int = 0  # deaths of workers that were running it, since it last returned
    retries: int = 0  # further attempts allowed after it failed by itself


class WorkerPool:
    """Runs `config.worker_concurrency` calls on each rollout worker. `on_failure` is called when no
    worker is left, or user code blocks for any input."""

    def __init__(
        self,
        config: RolloutConfig,
        context: ActorContext,
        on_failure: Callable[[UmbraError], None],
    ) -> None:
        names = config.worker_names
        self._workers = [
            _Worker(idx, name, context, self._on_change) for idx, name in enumerate(names)
        ]
        self._concurrency = concurrency = config.worker_concurrency
        # By method, for each worker: its running jobs, or `_NO_ROOM`. Lists of integers, because a
        # search through hundreds of workers for each job would take longer than the job.
        self._loads = {method: [_NO_ROOM] * len(names) for method in concurrency}
        self._max_deaths = config.max_worker_deaths
        self._on_failure = on_failure
        # Bounded by what the manager admits: a job per group or trajectory.
        self._queues: dict[str, asyncio.Queue[WorkerJob]] = {
            method: asyncio.Queue() for method in concurrency
        }
        self._quarantine_from = min(_QUARANTINE_FROM, config.max_worker_deaths)
        self._blocked = {method: BlockedInARow() for method in concurrency}
        self._has_room = asyncio.Event()  # a worker may have room for another job

    def put(self, job: WorkerJob) -> None:
        self._queues[job.method].put_nowait(job)

    def report_blocked(
        self, name: str, incarnation: int, sample_id: str, error: UmbraError
    ) -> None:
        """Notes which job blocks its worker; the job fails once the worker is gone."""
        for worker in self._workers:
            if worker.name == name:
                worker.blocked = _Blocked(incarnation, sample_id, error)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(self._keep(worker))
            for method, queue in self._queues.items():
                tasks.create_task(self._assign(method, queue, tasks))

    async def _keep(self, worker: _Worker) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                quarantine = tasks.create_task(self._serve_quarantine(worker))
                try:
                    await worker.stay_connected()
                finally:
                    quarantine.cancel()
        except* UmbraError as group:
            self._on_gone(worker, group.exceptions[0])

    def _on_gone(self, worker: _Worker, error: BaseException) -> None:
        reason = f"rollout worker {worker.name} is gone: {error}"
        worker.is_gone = True
        if all(worker.is_gone for worker in self._workers):
            self._on_failure(RolloutError(reason))
            return
        logger.warning("%s; the others do its work", reason)
        for job in worker.quarantine:
            self.put(job)
        worker.quarantine.clear()

    async def _assign(
        self, method: str, queue: asyncio.Queue[WorkerJob], tasks: asyncio.TaskGroup
    ) -> None:
        """Gives each job to the least busy worker, once one has room for it."""
        loads = self._loads[method]
        while True:
            job = await queue.get()
            while (least := min(loads)) == _NO_ROOM:
                self._has_room.clear()
                await self._has_room.wait()
            worker = self._workers[loads.index(least)]
            worker.begin_job(method)
            tasks.create_task(self._serve(job, worker))

    def _on_change(self, worker: _Worker) -> None:
        for method, limit in self._concurrency.items():
            has_room = worker.is_free and worker.running[method] < limit
            self._loads[method][worker.idx] = worker.num_running if has_room else _NO_ROOM
        self._has_room.set()

    async def _serve(self, job: WorkerJob, worker: _Worker) -> None:
        try:
            if worker.handle is None:  # it was lost a moment ago
                self.put(job)
            elif await self._attempt(job, worker, worker.handle):
                if worker.is_gone:
                    self.put(job)
                else:
                    worker.quarantine.append(job)
        finally:
            await worker.end_job(job.method)

    async def _serve_quarantine(self, worker: _Worker) -> None:
        while True:
            job = await worker.next_in_quarantine()
            while await self._attempt(job, worker, await worker.connected()):
                pass
            worker.quarantine.remove(job)
            self._on_change(worker)

    async def _attempt(self, job: WorkerJob, worker: _Worker, handle: Handle) -> bool:
        """Runs the job; returns whether it must run again, alone."""
        if not job.is_active():  # its group may have ended while it waited
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
        """Returns whether the job must run again, alone."""
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
        """Fails the job; the others in quarantine run again normally."""
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
        """Returns whether the job must run again, alone."""
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
        handle: to the live incarnation; None while there is none.
        is_gone: whether it will not come back.
        quarantine: jobs that run alone here, in this order.
        num_running, running: jobs here outside of quarantine, in all and by method.
        blocked: the worker's last report.
    """

    def __init__(
        self, idx: int, name: str, context: ActorContext, on_change: Callable[[_Worker], None]
    ) -> None:
        self.idx = idx
        self.name = name
        self.handle: Handle | None = None
        self.is_gone = False
        self.quarantine: list[WorkerJob] = []
        self.num_running = 0
        self.running: Counter[str] = Counter()
        self.blocked: _Blocked | None = None
        self._changed = asyncio.Condition()
        self._context = context
        self._on_change = on_change
        self._lost_incarnation = 0

    @property
    def is_free(self) -> bool:
        return self.handle is not None and not self.quarantine

    def begin_job(self, method: str) -> None:
        self.num_running += 1
        self.running[method] += 1
        self._on_change(self)

    async def end_job(self, method: str) -> None:
        """The job may be in quarantine by now."""
        async with self._changed:
            self.num_running -= 1
            self.running[method] -= 1
            self._changed.notify_all()
        self._on_change(self)

    async def next_in_quarantine(self) -> WorkerJob:
        async with self._changed:
            await self._changed.wait_for(lambda: self.quarantine and not self.num_running)
        return self.quarantine[0]

    async def connected(self) -> Handle:
        async with self._changed:
            await self._changed.wait_for(lambda: self.handle is not None)
        assert self.handle is not None
        return self.handle

    def on_lost(self, ref: ActorRef) -> None:
        """Disconnects a dead incarnation; `stay_connected` waits for the next one."""
        self._lost_incarnation = max(self._lost_incarnation, ref.incarnation)
        if self.handle is not None and self.handle.ref.incarnation <= ref.incarnation:
            self.handle = None
            self._on_change(self)
            self._context.client.drop(ref, "a call of it was lost")  # ends `stay_connected`

    async def stay_connected(self) -> None:
        """Connects to each incarnation of the worker, and notices the loss of one that is idle.
        Raises UmbraError when the worker will not come back, or not in time."""
        while True:
            lost = self._lost_incarnation
            ref = await self._context.resolve(self.name, _RESOLVE_TIMEOUT_S, lost)
            handle = self._context.client.handle(ref)
            with suppress(TransportError):
                ended = await handle.connect(_CONNECT_TIMEOUT_S)
                async with self._changed:
                    self.handle = handle
                    self._changed.notify_all()
                self._on_change(self)
                await ended.wait()
            self.on_lost(ref)


class BlockedInARow:
    """Counts how often calls of one kind ended their worker by blocking, since one returned. Pure.
    A prompt that blocks is dropped, and calls for other prompts return in between."""

    def __init__(self) -> None:
        self._groups: set[str] = set()
        self._num_ends = 0

    def on_done(self) -> None:
        self._groups.clear()
        self._num_ends = 0

    def on_blocked(self, group_id: str) -> str:
        """Counts a blocked call; returns the counts if there were too many in a row, else ""."""
        self._groups.add(group_id)
        self._num_ends += 1
        if len(self._groups) < _MAX_PROMPTS:
            return ""
        return (
            f"that ended {self._num_ends} processes in a row, for {len(self._groups)} prompts, "
            "and no other call returned in between"
        )
