"""The samples of a run's ledger, for readers, without reading all of it.

Each complete part of the ledger has an index beside it (`index_part.py`). The rollout manager
writes them as it goes, and a reader writes missing ones. A reader takes the table of the last
index, reads on in the log from there, and opens the rows of earlier parts only for the samples it
shows. A sample's tokens and history are read again from its frames, from the first to the last.

A part's trained samples count unless the job has, in a later part, gone back before their step.
"""

from __future__ import annotations

import difflib
import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Final

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.index_part import (
    BadIndexError,
    IndexPart,
    KeptSamples,
    Life,
    digest_of,
    read_kept,
    remove_logs,
    write_kept,
)
from umbra.runtime.rollout.ledger.ledger_events import Batch, Restored
from umbra.runtime.rollout.ledger.ledger_history import (
    History,
    Position,
    extend_history,
    header_of,
    kept_path,
    read_history,
)
from umbra.runtime.rollout.ledger.sample_accounts import SampleRow, SampleState
from umbra.runtime.rollout.ledger.sample_contents import SampleContent, read_contents
from umbra.runtime.rollout.ledger.sample_story import story_of
from umbra.runtime.rollout.ledger.sample_table import EvaluationRow, SampleTable

_KEPT_PARTS: Final = 4
"""Parts whose rows are kept in memory, at 10 MB each. Fewer are read again by a page that shows the
newest samples; more take memory."""
_COMPARED_GROUPS: Final = 5000


class LedgerIndex:
    """The samples of one ledger. Blocking: one thread at a time may use it. Steps are counted from
    0 here, as in the ledger. Any method may raise LedgerError: the ledger is damaged or
    contradicts itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin_again()
        self.refresh()

    def _begin_again(self) -> None:
        self._history = History(self._folder, ())
        self._begins = [0]  # of each part in the bytes of all
        self._parts: list[IndexPart] = []  # of all parts but the last
        self._limits: list[float] = []  # by part: the step from which on its rows do not count
        self._table = SampleTable()
        self._read_to = (0, 0)  # part and byte of the table
        self._num_removed = 0  # parts whose log was removed
        self._lives: dict[int, Life] = {}  # by part, of headers as before the log was read
        self._rows: dict[int, list[SampleRow]] = {}
        self._kept_part = (-1, KeptSamples({}, {}))  # the part that was read last, by number

    def refresh(self) -> None:
        history = extend_history(self._history) or read_history(self._folder)
        complete = history.parts[:-1]
        number, nbytes = self._read_to
        is_lost = (
            bool(nbytes)
            and any(  # a manager wrote late, or a part was removed
                log.stop < nbytes or not log.path.exists()
                for log in history.parts[number : number + 1]
            )
        )
        if is_lost or [part.log for part in self._parts] != list(complete[: len(self._parts)]):
            self._begin_again()
        self._history = history
        self._begins = [0, *accumulate(part.stop for part in history.parts)]
        self._has_left(0)
        for number in range(len(self._parts), len(history.parts)):
            self._read_part(number, is_complete=number < len(complete))
        self._limits = self._limits_before(len(self._parts), self._table.restores)
        self._table.flush()

    def write(self) -> None:
        """Writes the index of the last part, so that the next reader begins at its end."""
        number, nbytes = self._read_to
        if nbytes:
            self._write_part(self._table, number, nbytes)

    @property
    def table(self) -> SampleTable:
        return self._table

    @property
    def end(self) -> str:
        return str(self._history.end)

    def lives(self) -> list[Life]:
        lives = [part.facts.life for part in self._parts if not part.log.part]
        if self._history.parts and not self._history.parts[-1].part:
            lives.append(self._lives.get(len(self._history.parts) - 1))
        return [life for life in lives if life is not None]

    def evaluations(self) -> list[EvaluationRow]:
        """The evaluations of the surviving history, oldest first; the last of each step."""
        found: dict[int, EvaluationRow] = {}
        for part, limit in zip(self._parts, self._limits, strict=True):
            for evaluation in part.facts.evaluations:
                if evaluation.step <= limit:
                    found.pop(evaluation.step, None)
                    found[evaluation.step] = evaluation
        for evaluation in self._table.evaluations:
            found.pop(evaluation.step, None)
            found[evaluation.step] = evaluation
        return list(found.values())

    def steps(self) -> list[int]:
        """The first and the last step that samples were leased for; empty without any."""
        found = [row.step for row in self._table.rows() if row.step is not None]
        for part, limit in zip(self._parts, self._limits, strict=True):
            found += [step for step in part.facts.steps if step < limit]
        return [min(found), max(found)] if found else []

    def find(self, sample_id: str) -> SampleRow | None:
        group_id, _, _ = sample_id.rpartition("/")
        return next((row for row in self.group(group_id) if row.sample_id == sample_id), None)

    def group(self, group_id: str) -> list[SampleRow]:
        found = [row for row in self.table.rows() if row.group.group_id == group_id]
        for number, part in enumerate(self._parts):
            if part.facts.may_have_group(group_id):
                found += [row for row in self._valid_rows(number) if row.group.group_id == group_id]
        return sorted(found, key=lambda row: row.uid)

    def similar(self, sample_id: str, limit: int = 3) -> list[str]:
        group_id, _, _ = sample_id.rpartition("/")
        siblings = [*self.group(group_id), *self.group(sample_id)]
        if siblings:
            return [row.sample_id for row in siblings[:limit]]
        # Comparing is slow, and the newest few thousand groups are enough for a hint.
        names: dict[str, None] = {}
        for row in self._newest_rows():
            names[row.group.group_id] = None
            if len(names) == _COMPARED_GROUPS:
                break
        close = difflib.get_close_matches(group_id or sample_id, names, limit)
        return [f"{name}/0" for name in close]

    def of_step(self, step: int) -> list[SampleRow]:
        found = [row for row in self.table.rows() if row.step == step]
        for number, part in enumerate(self._parts):
            if part.facts.steps and part.facts.steps[0] <= step <= part.facts.steps[1]:
                found += [row for row in self._valid_rows(number) if row.step == step]
        return sorted(found, key=lambda row: -row.uid)

    def newest(
        self, limit: int | None, state: SampleState | None = None, step: int | None = None
    ) -> tuple[list[SampleRow], int]:
        """The newest `limit` samples (None: all), newest first, and
        the number of all that match."""
        if step is not None:
            rows = [row for row in self.of_step(step) if state in (None, row.state)]
            return rows[:limit], len(rows)
        num_samples = self.table.next_uid if state is None else self.table.counts[state]
        wanted = num_samples if limit is None else min(limit, num_samples)
        return self._first(wanted, lambda row: state in (None, row.state), state), num_samples

    def with_tokens(self, limit: int, step: int | None = None) -> tuple[list[SampleRow], int]:
        """Like `newest`, for samples with a completion."""
        if step is not None:
            rows = [row for row in self.of_step(step) if row.num_tokens]
            return rows[:limit], len(rows)
        num_samples = sum(row.num_tokens > 0 for row in self.table.rows())
        num_samples += self._table.num_with_tokens
        return self._first(min(limit, num_samples), lambda row: row.num_tokens > 0), num_samples

    def extremes(
        self, limit: int, *, best: bool, step: int | None = None
    ) -> tuple[list[SampleRow], int]:
        """Like `newest`, for samples with the highest rewards, or the lowest. With equal
        rewards, different prompts come first, and the newest among them."""
        sign = -1.0 if best else 1.0
        if step is not None:
            rows = [row for row in self.of_step(step) if row.reward is not None]
            return _by_reward(rows, sign)[:limit], len(rows)
        rows = [row for row in self.table.rows() if row.reward is not None]
        num_samples = len(rows) + self._table.num_scored
        # By the best reward that a part may add, and the newest of these first.
        parts = sorted(
            (min(sign * reward for reward in part.facts.rewards), -part.facts.uids[1], number)
            for number, part in enumerate(self._parts)
            if part.facts.rewards
        )
        for reward, newest, number in parts:
            if len(rows) >= limit:
                rows = _by_reward(rows, sign)[:limit]
                if _is_before(rows, sign, reward, newest):
                    break
            rows += [row for row in self._valid_rows(number) if row.reward is not None]
        return _by_reward(rows, sign)[:limit], num_samples

    def keeps(self, row: SampleRow) -> bool:
        """Whether the log still has everything about a sample."""
        return not self._has_left(row.begin)

    def contents(
        self, rows: Sequence[SampleRow], *, with_teacher: bool = False
    ) -> dict[int, SampleContent]:
        """Tokens and recorded values by uid, where they are kept; with the teacher's logprobs only
        if they are asked for, because they come after the last token."""
        found: dict[int, SampleContent] = {}
        wanted = sorted(rows, key=lambda row: row.begin)
        while wanted and self._has_left(wanted[0].begin):
            row = wanted.pop(0)
            found |= {uid: c for uid, c in self._kept(row).contents.items() if uid == row.uid}
        while wanted:  # samples that were generated side by side are read together
            begin, end, together = wanted[0].begin, 0, dict[int, int]()
            while wanted and (not end or wanted[0].begin < end):
                row = wanted.pop(0)
                last = row.end if with_teacher else row.finished
                end = max(end, self._begins[-1] if last is None else last)
                together[row.uid] = row.num_tokens
            events = (event for batch in self._batches(begin, end) for event in batch.events)
            found |= read_contents(events, together)
        return found

    def story(self, row: SampleRow) -> list[dict[str, Any]]:
        """The history of a sample, oldest first; empty if it is no longer kept."""
        if self._has_left(row.begin):
            return []
        end = self._begins[-1] if row.end is None else row.end
        return story_of(row.uid, self._batches(row.begin, end), self._table.versions)

    def digest(self, row: SampleRow) -> str | None:
        """The digest of tokens that left the log; None if the sample was trained again since."""
        if not self._has_left(row.begin):
            return None
        digest = self._kept(row).digests.get(row.uid)
        return None if digest is None else digest.hex()

    def remove_oldest(
        self, keep_nbytes: float, needed: Position, max_parts: int = sys.maxsize
    ) -> None:
        """Removes logs of at most `max_parts` of the oldest parts, as `index_part` says. The
        newest `keep_nbytes` stay, and so does everything from `needed` on, where a start of the
        manager may begin to read. Raises OSError if a file cannot be removed."""
        begins = self._begins
        numbers = [(part.log.incarnation, part.log.part) for part in self._parts]
        of_needed = sum(number < needed[:2] for number in numbers)
        limit = min([begins[-1] - keep_nbytes, *(row.begin for row in self._table.live.values())])
        first = self._num_removed
        num_due = min(bisect_right(begins, limit) - 1, of_needed, first + max_parts)
        num_removed = first + sum(1 for _ in takewhile(self._is_indexed, range(first, num_due)))
        if num_removed == first:
            return
        for number, part in enumerate(self._parts[first:], first):
            log, is_due = part.log.path, part.facts.first < begins[num_removed]
            if (number < num_removed or is_due) and not kept_path(log).exists():
                write_kept(log, self._to_keep(number))
        remove_logs(part.log.path for part in self._parts[first:num_removed])
        self._num_removed = num_removed

    def _has_left(self, at: int) -> bool:
        """Whether the log at a byte was removed; logs are removed while readers read."""
        while self._num_removed < len(self._history.parts) - 1:
            if self._history.parts[self._num_removed].path.exists():
                break
            self._num_removed += 1
        return at < self._begins[self._num_removed]

    def _read_part(self, number: int, *, is_complete: bool) -> None:
        log, begin = self._history.parts[number], self._begins[number]
        is_removed = number < self._num_removed
        if number not in self._lives and log.stop and not is_removed:
            header = header_of(log.path)
            self._lives[number] = Life(header.incarnation, header.job_id, header.time_s)
        if self._read_to[0] < number or not self._read_to[1]:
            with suppress(BadIndexError):
                part = IndexPart.read(log, begin)
                if part.facts.life != self._lives.get(number) and not is_removed:
                    raise BadIndexError
                if is_complete and part.facts.nbytes == log.stop:
                    self._parts.append(part)
                    return
                self._table, self._read_to = part.table(), (number, part.facts.nbytes)
        if self._read_to[0] < number:
            self._table, self._read_to = self._table_after(number - 1), (number, 0)
        self._read_log(self._table, number, self._read_to[1])
        self._read_to = (number, log.stop)
        if is_complete:
            self._parts.append(self._write_part(self._table, number, log.stop))
            self._table.begin_part()
            self._read_to = (number + 1, 0)

    def _table_after(self, number: int) -> SampleTable:
        """The table at the end of a complete part. Damaged indexes are written again."""
        table, first = SampleTable(), 0
        for earlier in range(number, -1, -1):
            with suppress(BadIndexError):
                table, first = self._parts[earlier].table(), earlier + 1
                table.begin_part()
                break
        for later in range(first, number + 1):
            self._read_log(table, later, 0)
            nbytes = self._history.parts[later].stop
            self._parts[later] = self._write_part(table, later, nbytes)
            table.begin_part()
        return table

    def _read_log(self, table: SampleTable, number: int, start: int) -> None:
        log, begin = self._history.parts[number], self._begins[number]
        if number < self._num_removed:
            raise LedgerError(
                f"{log.path.with_suffix('.index')} is missing or damaged, and {log.path.name}, "
                "from which it was made, was removed: restore one of them from a backup"
            )
        where = log.incarnation, log.part
        start_at, stop_at = Position(*where, start), Position(*where, log.stop)
        for position, end, batch in self._history.entries(start_at, stop_at):
            for event in batch.events:
                if isinstance(event, Restored):
                    table.take_back(self._trained(event.step, number, table.restores))
                try:
                    table.apply(event, batch.time_s, begin + position.offset, begin + end)
                except LedgerError as error:
                    raise LedgerError(f"the ledger at {position}: {error}") from error

    def _write_part(self, table: SampleTable, number: int, nbytes: int) -> IndexPart:
        log = self._history.parts[number]
        return IndexPart.write(log, self._begins[number], nbytes, self._lives.get(number), table)

    def _trained(self, step: int, number: int, restores: Iterable[int]) -> Iterator[SampleRow]:
        """The rows before a part that were trained in `step` or later, after these restores."""
        limits = self._limits_before(number, restores)
        for earlier, limit in enumerate(limits):
            steps = self._parts[earlier].facts.steps
            if steps and steps[1] >= step:
                for row in self._load_rows(earlier):
                    if row.step is not None and step <= row.step < limit:
                        yield row

    def _limits_before(self, number: int, restores: Iterable[int]) -> list[float]:
        """The lowest step that the job went back to later, for each part before this one."""
        limits: list[float] = []
        limit = min(restores, default=math.inf)
        for part in reversed(self._parts[:number]):
            limits.append(limit)
            limit = min(limit, *part.facts.restores, math.inf)
        return limits[::-1]

    def _valid_rows(self, number: int) -> list[SampleRow]:
        """The rows of a complete part that count."""
        if number not in self._rows:
            while len(self._rows) >= _KEPT_PARTS:
                del self._rows[next(iter(self._rows))]
            self._rows[number] = self._load_rows(number)
        limit = self._limits[number]
        return [row for row in self._rows[number] if row.step is None or row.step < limit]

    def _is_indexed(self, number: int) -> bool:
        """Whether a part's index is on disk; a damaged one is written again."""
        self._load_rows(number)
        return self._parts[number].is_on_disk

    def _load_rows(self, number: int) -> list[SampleRow]:
        try:
            return self._parts[number].rows()
        except BadIndexError:
            self._table_after(number)
            return self._parts[number].rows()

    def _first(
        self, limit: int, is_chosen: Callable[[SampleRow], bool], state: SampleState | None = None
    ) -> list[SampleRow]:
        """The newest chosen samples; `limit` is at most the number of all such."""
        found = [row for row in self._table.rows() if is_chosen(row)]
        found.sort(key=lambda row: -row.uid)
        for part, number in self._newest_parts():
            if len(found) >= limit and (not limit or found[limit - 1].uid > part.facts.uids[1]):
                break
            if state is not SampleState.DROPPED or part.facts.num_dropped:
                found += filter(is_chosen, self._valid_rows(number))
                found.sort(key=lambda row: -row.uid)
                del found[limit:]
        return found[:limit]

    def _newest_parts(self) -> list[tuple[IndexPart, int]]:
        parts = [(part, number) for number, part in enumerate(self._parts) if part.facts.uids]
        return sorted(parts, key=lambda found: -found[0].facts.uids[1])

    def _newest_rows(self) -> Iterator[SampleRow]:
        yield from sorted(self._table.rows(), key=lambda row: -row.uid)
        for _, number in self._newest_parts():
            yield from reversed(self._valid_rows(number))

    def _batches(self, begin: int, end: int) -> Iterator[Batch]:
        for entry in self._history.entries(self._position(begin), self._position(end)):
            yield entry.batch

    def _position(self, at: int) -> Position:
        number = min(bisect_right(self._begins, at), len(self._history.parts)) - 1
        _, incarnation, part, _ = self._history.parts[number]
        return Position(incarnation, part, at - self._begins[number])

    def _to_keep(self, number: int) -> KeptSamples:
        rows = self._valid_rows(number)
        contents = self.contents(rows)  # lacks samples whose first frames had left the log before
        steps: dict[int | None, list[SampleRow]] = {}
        for row in rows:
            if row.uid in contents and row.reward is not None:
                steps.setdefault(row.step, []).append(row)
        chosen: set[int] = set()
        for scored in steps.values():
            chosen |= {_by_reward(scored, sign)[0].uid for sign in (-1.0, 1.0)}
        return KeptSamples(
            {uid: digest_of(content.tokens) for uid, content in contents.items()},
            {uid: contents[uid] for uid in chosen},
        )

    def _kept(self, row: SampleRow) -> KeptSamples:
        """The digests and texts of the part in which a sample ended, whose log was removed."""
        number = -1 if row.end is None else bisect_right(self._begins, row.end - 1) - 1
        log = self._history.parts[number].path
        if number < 0 or (number >= self._num_removed and not kept_path(log).exists()):
            return KeptSamples({}, {})  # it came back after its first frames were removed
        if self._kept_part[0] != number:
            self._kept_part = number, read_kept(log)
        return self._kept_part[1]


def _by_reward(rows: Iterable[SampleRow], sign: float) -> list[SampleRow]:
    newest = sorted(rows, key=lambda row: -row.uid)
    seen = Counter[tuple[str, float | None]]()
    ranks: dict[int, int] = {}
    for row in newest:
        seen[same := (row.group.group_id, row.reward)] += 1
        ranks[row.uid] = seen[same]
    return sorted(newest, key=lambda row: (sign * (row.reward or 0.0), ranks[row.uid]))


def _is_before(chosen: Sequence[SampleRow], sign: float, reward: float, newest: int) -> bool:
    """Whether a part, by its lowest signed reward and negative uid, has no sample to choose."""
    last = sign * (chosen[-1].reward or 0.0)
    are_first = len({row.group.group_id for row in chosen}) == len(chosen)
    return last < reward or (last == reward and -chosen[-1].uid < newest and are_first)
