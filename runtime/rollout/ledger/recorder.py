"""Records the events of training samples in the manager's ledger.

All events of one iteration of the event loop are appended to the ledger together, in order.
Adjacent events of one kind become one event with columns. Samples that are not trained on (uid -1)
are not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import LedgerError, RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.token_store import Runs
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED, Group, Trajectory
from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Checkpoint,
    Cut,
    Dropped,
    Evaluated,
    Event,
    Finished,
    Leased,
    PromptGiven,
    Recorded,
    Reset,
    Restored,
    RewardParts,
    Scored,
    Started,
    TeacherLogprobs,
    Tokens,
    Version,
    encode_event,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import BEGIN, History, Position, read_history
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_snapshot import LedgerContent, Restores, read_content
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter, Ticket
from umbra.runtime.rollout.ledger.snapshot_taker import SnapshotTaker

logger = logging.getLogger(__name__)

NOT_RECORDED: Final = -1
_DURABLE_TIMEOUT_S: Final = 60.0
_MAX_CAUSE_LEN: Final = 1000
"""An exception's text may be a whole page of HTML."""


class Recorder:
    """Writes one incarnation of a manager's ledger. An async context manager; owns log and writer.

    Args:
        folder: of this manager's ledger; None records nothing.
        on_failure: called once when the ledger can no longer be written.
        keep_nbytes: size of the newest part of the ledger's log that keeps everything.
    """

    def __init__(
        self,
        folder: Path | None,
        on_failure: Callable[[UmbraError], None],
        keep_nbytes: float = math.inf,
    ) -> None:
        self._folder = folder
        self._on_failure = on_failure
        self._stack = contextlib.AsyncExitStack()
        self._writer: LedgerWriter | None = None
        self._snapshots: SnapshotTaker | None = None
        if folder is not None:
            self._snapshots = SnapshotTaker(folder, keep_nbytes, self._resume)
        self._ticket: Ticket | None = None
        self._next_uid = 0
        self._versions: set[int] = set()
        self._scored: set[int] = set()  # uids of samples that are scored and not leased
        self._has_failed = False
        self._step = 0
        self._pending: list[tuple[str, Any]] = []  # (kind, part of an event), see `_EVENTS`
        self._on_capacity: Callable[[], None] | None = None

    async def __aenter__(self) -> Self:
        if self._folder is not None and self._snapshots is not None:
            await self._stack.enter_async_context(self._snapshots)
            log = await asyncio.to_thread(LedgerLog.open, self._folder, "umbra")
            self._writer = await self._stack.enter_async_context(
                LedgerWriter(log, on_progress=self._on_progress)
            )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._on_capacity = None
        self._flush()
        await self._stack.aclose()

    async def run(self) -> None:
        """Has snapshots taken until cancelled."""
        if self._snapshots is not None:
            await self._snapshots.run()

    async def recover(self, restored: Restored | None, needs: str = "") -> LedgerState | None:
        """Reads the state at the end of the history; None without a ledger.

        `restored` is the checkpoint that the job resumes from, None if the job never stopped;
        `needs` is the position stored in it. Raises LedgerError if the history is damaged, ends
        before that position, or has since gone back behind the checkpoint.
        """
        if self._writer is None or self._folder is None or self._snapshots is None:
            return None
        await self.durable()
        step = None if restored is None else restored.step
        content, nbytes = await asyncio.to_thread(_read, self._folder, needs, step)
        state, snapshot = content.state, content.snapshot
        behind = f"behind {snapshot.path.name}" if snapshot else "and no snapshot"
        logger.info("read %d bytes of the ledger %s", nbytes, behind)
        self._snapshots.begin(nbytes, snapshot.steps_done if snapshot else 0)
        first: list[Event] = []
        if len(running := state.running()):
            first.append(Cut(running, "the rollout manager restarted"))
        if restored is not None and (state.num_groups or state.versions or state.evaluation):
            first.append(restored)
        for event in first:
            state.apply(event)
        if first:
            self._ticket = self._writer.append(*first)
        self._next_uid = state.next_uid
        self._versions = set(state.versions)
        self._step = state.steps_done
        self._scored = set(state.scored().tolist())
        return state

    async def durable(self) -> None:
        """Returns when all events so far are on disk; LedgerError after a minute of silence."""
        self._flush()
        if self._writer is not None and self._ticket is not None:
            await self._writer.durable(self._ticket, _DURABLE_TIMEOUT_S)

    @property
    def position(self) -> str:
        """The position after the last durable frame, for checkpoints; "" without a ledger."""
        return "" if self._writer is None else str(self._writer.position)

    @property
    def has_capacity(self) -> bool:
        """False while the disk or the taking of snapshots is too far behind for new groups."""
        if self._writer is None or self._snapshots is None:
            return True
        return self._writer.has_capacity and not self._snapshots.is_behind

    def on_capacity(self, resume: Callable[[], None]) -> None:
        """Calls `resume` once, as soon as there is capacity; a later call replaces it."""
        self._on_capacity = resume

    @property
    def queued_nbytes(self) -> int:
        return 0 if self._writer is None else self._writer.queued_nbytes

    def admitted(self, group: Group, epoch: int, order_idx: int) -> None:
        """Records a new group and gives its samples their uids."""
        if self._writer is None:
            return
        first_uid = self._next_uid
        for sample in group.trajectories:
            sample.uid = self._next_uid
            self._next_uid += 1
        seeds = np.asarray([sample.seed for sample in group.trajectories], np.int64)
        prompt_id = group.trajectories[0].prompt.prompt_id
        self._write(Admitted(first_uid, group.group_id, prompt_id, epoch, order_idx, seeds))

    def scored(self, samples: Iterable[Trajectory]) -> None:
        """Records rewards of samples and their parts, once for each."""
        for sample in samples:
            if sample.uid not in self._scored:
                self._scored.add(sample.uid)
                self._add("scored", sample, (sample.reward, sample.reward_parts))

    def teacher_scored(self, sample: Trajectory) -> None:
        if sample.uid != NOT_RECORDED and sample.teacher_logprobs is not None:
            self._write(TeacherLogprobs(sample.uid, sample.teacher_logprobs))

    def leased(self, step: int, groups: Sequence[Group]) -> None:
        uids = _uids(groups)
        self._scored.difference_update(uids.tolist())
        self._write(Leased(step, uids))

    def dropped(self, group: Group, reason: str, cause: str = "") -> None:
        """`cause` has details and is cut if it is long."""
        uids = _uids([group])
        self._scored.difference_update(uids.tolist())
        self._write(Dropped(uids, reason, cause[:_MAX_CAUSE_LEN]))

    def started(self, sample: Trajectory) -> None:
        """Engines have the sample; an agent loop's counts as running between turns."""
        if not sample.is_recorded_running:
            sample.is_recorded_running = True
            self._add("started", sample, None)

    def cut(self, sample: Trajectory) -> None:
        if sample.is_recorded_running:
            sample.is_recorded_running = False
            self._add("cut", sample, None)

    def finished(self, sample: Trajectory) -> None:
        sample.is_recorded_running = False
        self._add("finished", sample, sample.finish_reason)

    def prompt_replaced(self, sample: Trajectory, tokens: NDArray[np.int32]) -> None:
        """An agent loop replaces the prompt by `tokens`. Raises
        LedgerError if they are too many."""
        self._write_checked(sample, PromptGiven(max(0, sample.uid), tokens))

    def tokens_given(self, sample: Trajectory, start: int) -> None:
        """An agent loop appended the tokens from `start` on to the completion."""
        self._append_run(sample, start, NOT_GENERATED)

    def tokens_restored(self, sample: Trajectory, start: int) -> None:
        """Tokens of one version, from `start` on, existed before a reset."""
        self.started(sample)
        self._append_run(sample, start, int(sample.versions[start]))

    def reset(self, sample: Trajectory, reason: str) -> None:
        sample.is_recorded_running = False
        if sample.uid != NOT_RECORDED:
            self._write(Reset(sample.uid, reason))

    def value_kept(self, sample: Trajectory, key: str, value: object) -> None:
        """Records a value for later runs. Raises LedgerError if it is
        not plain data, or too large."""
        self._write_checked(sample, Recorded(max(0, sample.uid), key, value))

    def on_tokens(self, runs: Runs) -> None:
        for version in {*runs.versions.tolist()} - self._versions - {NOT_GENERATED}:
            self.version(version, self._step)  # ranks published it without announcing it
        for part in Tokens(*runs).parts():
            self._write(part)

    def version(self, version: int, step: int) -> None:
        """`version` is the weights after `step` steps; the first record counts."""
        self._step = max(step, self._step)
        if version in self._versions:
            return
        if version < max(self._versions, default=-1):
            self._fail(
                RolloutError(
                    f"version {version} comes after version {max(self._versions)}: an engine has "
                    "weights that no rank has announced, or a version was used again"
                )
            )
            return
        self._versions.add(version)
        self._write(Version(version, step))

    def evaluated(self, step: int, temperature: float, outcome: Mapping[str, Any]) -> None:
        self._write(Evaluated(step, float(temperature), outcome))

    def checkpoint(self, step: int, version: int, kept: Sequence[int]) -> None:
        """A checkpoint is complete. `kept`: steps of all that the job may resume from."""
        self._write(Checkpoint(step, version))
        if self._snapshots is not None:
            self._snapshots.checkpoints = kept

    def _append_run(self, sample: Trajectory, start: int, version: int) -> None:
        tokens, logprobs = sample.tokens[start:].copy(), sample.logprobs[start:].copy()
        if sample.uid == NOT_RECORDED or not len(tokens):
            return
        starts, offsets, versions = map(np.asarray, ([start], [0, len(tokens)], [version]))
        self.on_tokens(Runs(uids_of(sample.uid), starts, offsets, versions, tokens, logprobs))

    def _write_checked(self, sample: Trajectory, event: PromptGiven | Recorded) -> None:
        """Raises the errors of its flush here, because the caller can act on them."""
        try:
            encode_event(event)
        except LedgerError as error:
            raise LedgerError(f"{sample.sample_id}: {error}") from error
        if sample.uid != NOT_RECORDED:
            self._write(event)

    def _write(self, event: Event) -> None:
        self._queue("event", event)

    def _add(self, kind: str, sample: Trajectory, value: object) -> None:
        if sample.uid != NOT_RECORDED:
            self._queue(kind, (sample.uid, value))

    def _queue(self, kind: str, part: object) -> None:
        if self._writer is None or self._has_failed:
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append((kind, part))

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if not pending or self._writer is None:
            return
        events: list[Event] = []
        for kind, group in groupby(pending, key=itemgetter(0)):
            events += _EVENTS[kind]([part for _, part in group])
        try:
            self._ticket = self._writer.append(*events)
        except LedgerError as error:
            self._fail(error)

    def _on_progress(self) -> None:
        if self._writer is not None and self._writer.failure is not None:
            self._fail(self._writer.failure)
            return
        if self._writer is not None and self._snapshots is not None:
            writer = self._writer
            self._snapshots.observe(writer.position, writer.written_nbytes, self._step)
        self._resume()

    def _resume(self) -> None:
        if self.has_capacity and self._on_capacity is not None:
            resume, self._on_capacity = self._on_capacity, None
            resume()

    def _fail(self, error: UmbraError) -> None:
        """Stops writing: later events could depend on those that are missing."""
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(error)


def _read(folder: Path, needs: str, restoring_step: int | None) -> tuple[LedgerContent, int]:
    """The content of a ledger, and how many bytes of its log were read."""
    history = read_history(folder)
    content = read_content(history, restoring_step)
    if needs and restoring_step is not None:
        _check_fit(history, content.restores, Position.parse(needs), restoring_step)
    start = BEGIN if content.snapshot is None else content.snapshot.position
    return content, history.nbytes_after(start)


def _check_fit(history: History, restores: Restores, needs: Position, step: int) -> None:
    """Raises LedgerError unless the history contains a checkpoint after `step` steps at
    `needs`. If the job went back behind the checkpoint, its training data has been generated or
    delivered again since."""
    if not history.covers(needs):
        raise LedgerError(
            f"the ledger in {history.folder} ends at {history.end}, but the checkpoint was made at "
            f"{needs}: put the ledger's files back, resume from an older checkpoint, or begin "
            "another run.dir with this checkpoint (run.resume=PATH)"
        )
    for position, restored_step in restores:
        if restored_step < step and position >= needs:
            raise LedgerError(
                f"the checkpoint after {step} steps was made at {needs} of the ledger in "
                f"{history.folder}, but the job later went back to step {restored_step}, at "
                f"{position}: remove the checkpoint, or resume from it in another run.dir"
            )


def _uids(groups: Sequence[Group]) -> NDArray[np.int64]:
    return uids_of(*(sample.uid for group in groups for sample in group.trajectories))


def _column(parts: Sequence[tuple[int, Any]]) -> NDArray[np.int64]:
    return uids_of(*(uid for uid, _ in parts))


def _scored(parts: Sequence[tuple[int, tuple[float, Mapping[str, float]]]]) -> list[Event]:
    """Parts come first: after a crash between the two, a sample is scored again."""
    events: list[Event] = []
    for names, same in groupby(parts, key=lambda part: tuple(part[1][1])):
        group = list(same)
        if names:
            values = [float(of_one[name]) for _, (_, of_one) in group for name in names]
            events.append(RewardParts(_column(group), names, np.asarray(values, np.float64)))
    rewards = np.asarray([reward for _, (reward, _) in parts], np.float64)
    return [*events, Scored(_column(parts), rewards)]


_EVENTS: Final[dict[str, Callable[[list[Any]], list[Event]]]] = {
    "event": lambda parts: parts,
    "started": lambda parts: [Started(_column(parts))],
    "cut": lambda parts: [Cut(_column(parts), "interrupted")],
    "finished": lambda parts: [Finished(_column(parts), [reason for _, reason in parts])],
    "scored": _scored,
}
