"""A SQLite database of a run's ledgers, for queries only. It is rebuilt from the ledgers' files.

It is in memory or on a node's own disk, because SQLite's locks do not work on NFS.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import (
    GIVEN,
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
    Scored,
    Started,
    Tokens,
    Version,
)
from umbra.runtime.rollout.ledger.ledger_history import (
    Entry,
    History,
    ledger_folder,
    managers_of,
    read_history,
)
from umbra.runtime.rollout.ledger.ledger_replay import replay
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import GroupAccount, SampleState

_SCHEMA: Final = """
CREATE TABLE managers (
    manager TEXT PRIMARY KEY, position TEXT, steps_done INTEGER, covered_step INTEGER,
    generated_tokens INTEGER, given_tokens INTEGER, rolled_back_tokens INTEGER,
    reset_tokens INTEGER, interruptions INTEGER, resets INTEGER, restores INTEGER
);
CREATE TABLE lives (manager TEXT, life INTEGER, job_id TEXT, time_s REAL);
CREATE TABLE samples (
    manager TEXT, uid INTEGER, sample_id TEXT, group_id TEXT, prompt_id TEXT, epoch INTEGER,
    place INTEGER, seed INTEGER, state TEXT, finish_reason TEXT, reward REAL, step INTEGER,
    drop_reason TEXT, num_tokens INTEGER, interruptions INTEGER, resets INTEGER,
    rolled_back_tokens INTEGER, PRIMARY KEY (manager, uid)
);
CREATE TABLE segments (manager TEXT, uid INTEGER, start INTEGER, stop INTEGER, version INTEGER);
CREATE TABLE history (
    manager TEXT, uid INTEGER, life INTEGER, part INTEGER, offset INTEGER, time_s REAL,
    event TEXT, detail TEXT
);
CREATE TABLE evaluations (
    manager TEXT, step INTEGER, temperature REAL, time_s REAL, outcome TEXT
);
"""
_INDICES: Final = """
CREATE INDEX samples_by_name ON samples (sample_id);
CREATE INDEX samples_by_group ON samples (group_id);
CREATE INDEX segments_by_sample ON segments (manager, uid);
CREATE INDEX history_by_sample ON history (manager, uid);
"""
_BUFFERED_ROWS: Final = 10_000


class LedgerIndex:
    """The samples of all managers of a run, with their segments and their history.

    Owns the connection. Rows of `history` that concern the whole job have no uid. The step of a
    sample, which the ledger counts from 0, is here counted from 1 as in metrics.jsonl.

    Attributes:
        histories: by manager, what `build` has read.
    """

    def __init__(self, place: str | Path = ":memory:") -> None:
        self.histories: dict[str, History] = {}
        self._connection = sqlite3.connect(place)
        self._connection.row_factory = sqlite3.Row

    @classmethod
    def build(cls, run_dir: Path, place: str | Path = ":memory:") -> LedgerIndex:
        """Reads every ledger of a run into a new database; a file at `place` is replaced.

        Raises:
            LedgerError: a ledger is damaged or contradicts itself.
        """
        if place != ":memory:":
            Path(place).unlink(missing_ok=True)
        index = cls(place)
        try:
            with index._connection as connection:
                connection.executescript(_SCHEMA)
                for manager in managers_of(run_dir):
                    history = read_history(ledger_folder(run_dir, manager))
                    index.histories[manager] = history
                    _Filler(connection, manager).fill(history)
                connection.executescript(_INDICES)
        except BaseException:
            index.close()
            raise
        return index

    def __enter__(self) -> LedgerIndex:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def rows(self, query: str, *parameters: object) -> list[dict[str, Any]]:
        """The result of any query."""
        return [dict(row) for row in self._connection.execute(query, parameters)]

    def counts(self) -> dict[str, int]:
        """Number of samples by state, including states without samples."""
        found = self._connection.execute("SELECT state, count(*) FROM samples GROUP BY state")
        return dict.fromkeys(map(str, SampleState), 0) | {state: count for state, count in found}

    def drop_reasons(self) -> dict[str, int]:
        """Dropped samples by reason, most frequent first."""
        return dict(
            self._connection.execute(
                "SELECT drop_reason, count(*) FROM samples WHERE state = 'dropped' "
                "GROUP BY drop_reason ORDER BY count(*) DESC, drop_reason"
            ).fetchall()
        )

    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations of the surviving history, oldest first."""
        rows = self.rows("SELECT * FROM evaluations ORDER BY rowid")
        return [row | {"outcome": json.loads(row["outcome"])} for row in rows]

    def sample(self, sample_id: str) -> dict[str, Any] | None:
        """One sample with its `segments` and `history`, oldest first; None if there is none."""
        found = self.rows("SELECT * FROM samples WHERE sample_id = ?", sample_id)
        if not found:
            return None
        (row,) = found
        key = (row["manager"], row["uid"])
        which = "WHERE manager = ? AND uid = ? ORDER BY rowid"
        row["segments"] = self.rows(f"SELECT start, stop, version FROM segments {which}", *key)
        row["history"] = self.rows(
            f"SELECT life, part, offset, time_s, event, detail FROM history {which}", *key
        )
        return row

    def newest(
        self, limit: int, state: str | None = None, step: int | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """The samples admitted last, newest first, and the number of all that match. Those that
        were dropped have a `drop_detail`: the reason, and what caused it.

        Args:
            state: only samples that are in this state now.
            step: only samples that were leased for this step.
        """
        which = "FROM samples WHERE (?1 IS NULL OR state = ?1) AND (?2 IS NULL OR step = ?2)"
        ((num_samples,),) = self._connection.execute(f"SELECT count(*) {which}", (state, step))
        why = (
            "SELECT detail FROM history WHERE manager = samples.manager AND uid = samples.uid "
            "AND event = 'dropped' AND samples.state = 'dropped' ORDER BY rowid DESC LIMIT 1"
        )
        query = f"SELECT *, ({why}) AS drop_detail {which} ORDER BY uid DESC, manager LIMIT ?3"
        return self.rows(query, state, step, limit), num_samples

    def with_tokens(self, limit: int, step: int | None = None) -> tuple[list[dict[str, Any]], int]:
        """Samples with a completion, the last admitted first, at most `limit`; how many there are.

        Args:
            step: only samples that were leased for this step.
        """
        return self._chosen("num_tokens > 0", "uid DESC, manager", limit, step)

    def extremes(
        self, limit: int, *, best: bool, step: int | None = None
    ) -> tuple[list[dict[str, Any]], int]:
        """Samples with the highest rewards, or the lowest; likewise.

        Of equal rewards, different prompts come first, and of these the newest.
        """
        same = "PARTITION BY manager, group_id, reward ORDER BY uid DESC"
        order = f"reward {'DESC' if best else 'ASC'}, row_number() OVER ({same}), uid DESC, manager"
        return self._chosen("reward IS NOT NULL", order, limit, step)

    def _chosen(
        self, condition: str, order: str, limit: int, step: int | None
    ) -> tuple[list[dict[str, Any]], int]:
        which = f"FROM samples WHERE {condition} AND (?1 IS NULL OR step = ?1)"
        ((num_samples,),) = self._connection.execute(f"SELECT count(*) {which}", (step,))
        return self.rows(f"SELECT * {which} ORDER BY {order} LIMIT ?2", step, limit), num_samples

    def similar(self, sample_id: str, limit: int = 3) -> list[str]:
        """Sample ids that the user may have meant."""
        import difflib

        group_id, _, _ = sample_id.rpartition("/")
        siblings = self._column(
            "SELECT sample_id FROM samples WHERE group_id IN (?, ?) ORDER BY uid LIMIT ?",
            group_id,
            sample_id,
            limit,
        )
        if siblings:
            return siblings
        # Comparing is slow, and the newest few thousand groups are enough for a hint.
        groups = self._column("SELECT DISTINCT group_id FROM samples ORDER BY uid DESC LIMIT 5000")
        close = difflib.get_close_matches(group_id or sample_id, groups, limit)
        return [f"{name}/0" for name in close]

    def _column(self, query: str, *parameters: object) -> list[str]:
        return [row[0] for row in self._connection.execute(query, parameters)]


class _Filler:
    """Turns one manager's history into rows."""

    def __init__(self, connection: sqlite3.Connection, manager: str) -> None:
        self._connection = connection
        self._manager = manager
        self._rows: dict[str, list[tuple[Any, ...]]] = {}
        # (entry, time of the last run, start, stop, version) of tokens not yet in the history
        self._runs: dict[int, tuple[Entry, float, int, int, int]] = {}
        self._leased: dict[int, bool] = {}  # uid -> whether "trained" is in the history
        self._settled: list[tuple[int, int | None]] = []  # trained, by the current event
        self._rolled_back: dict[int, int] = {}
        self._evaluations: dict[int, tuple[Entry, Evaluated]] = {}  # by step, the last of each

    def fill(self, history: History) -> None:
        state = replay(history.entries, on_settled=self._on_settled, on_event=self._on_event)
        for uid in list(self._runs):
            self._end_run(uid)
        for group in state.groups():
            self._add_group(group)
        for entry, event in self._evaluations.values():
            outcome = json.dumps({k: v for k, v in event.outcome.items() if k != "samples"})
            self._add("evaluations", event.step, event.temperature, entry.batch.time_s, outcome)
        for header in history.headers():
            if header.part == 0:
                self._add("lives", header.incarnation, header.job_id, header.time_s)
        totals = asdict(state.totals)
        self._add(
            "managers", str(history.end), state.steps_done, state.covered_step,
            *[totals[name] for name in (
                "generated_tokens", "given_tokens", "rolled_back_tokens", "reset_tokens",
                "interruptions", "resets", "restores",
            )],
        )  # fmt: skip
        for table in list(self._rows):
            self._flush(table)

    def _on_event(self, entry: Entry, event: Event, state: LedgerState) -> None:
        match event:
            case Tokens():
                self._add_runs(entry, event)
            case Version():
                self._note(entry, None, "version", f"{event.version} after step {event.step}")
                self._note_trained(entry, state)
            case Checkpoint():
                self._note(entry, None, "checkpoint", f"after step {event.step}")
                self._note_trained(entry, state)
            case Restored():
                self._note(entry, None, "restored", f"to step {event.step}")
                self._note_restored(entry, event, state)
            case Evaluated():
                self._note(entry, None, "evaluated", f"after step {event.step}")
                self._evaluations.pop(event.step, None)
                self._evaluations[event.step] = (entry, event)
            case Admitted():
                for k in range(len(event.seeds)):
                    detail = f"index {event.order_idx} in the data"
                    self._note(entry, event.first_uid + k, "admitted", detail)
            case Finished():
                for uid, reason in zip(event.uids.tolist(), event.reasons, strict=True):
                    self._note(entry, uid, "finished", reason)
            case Scored():
                for uid, reward in zip(event.uids.tolist(), event.rewards.tolist(), strict=True):
                    self._note(entry, uid, "scored", f"reward {reward:g}")
            case Leased():
                self._leased.update(dict.fromkeys(event.uids.tolist(), False))
                self._note_all(entry, event.uids.tolist(), "leased", f"for step {event.step + 1}")
            case Started():
                self._note_all(entry, event.uids.tolist(), "started", "")
            case Cut():
                self._note_all(entry, event.uids.tolist(), "cut", event.reason)
            case Dropped():
                detail = ": ".join(filter(None, (event.reason, event.cause)))
                self._note_all(entry, event.uids.tolist(), "dropped", detail)
            case PromptGiven():
                self._note(entry, event.uid, "prompt", f"of {len(event.tokens)} tokens")
            case Reset():
                self._note(entry, event.uid, "reset", event.reason)
            case Recorded():
                self._note(entry, event.uid, "recorded", event.key)

    def _on_settled(self, group: GroupAccount) -> None:
        self._add_group(group)
        for sample in group.samples:
            if self._leased.pop(sample.uid, True) is False:
                self._settled.append((sample.uid, sample.step))
            self._rolled_back.pop(sample.uid, None)

    def _add_group(self, group: GroupAccount) -> None:
        for sample in group.samples:
            self._add(
                "samples", sample.uid, sample.sample_id, group.group_id, group.prompt_id,
                group.epoch, group.order_idx, sample.seed, str(sample.state), sample.finish_reason,
                sample.reward, _shown_step(sample.step), sample.drop_reason, sample.num_tokens,
                sample.num_interruptions, sample.num_resets, sample.num_rolled_back,
            )  # fmt: skip
            for segment in sample.segments():
                self._add("segments", sample.uid, *segment)

    def _add_runs(self, entry: Entry, event: Tokens) -> None:
        """Adds consecutive runs of one version to the history as one row."""
        bounds = event.offsets.tolist()
        runs = zip(event.uids.tolist(), event.starts.tolist(), event.versions.tolist(), strict=True)
        for idx, (uid, start, version) in enumerate(runs):
            stop = start + bounds[idx + 1] - bounds[idx]
            first, begin = entry, start
            if uid in self._runs and self._runs[uid][4] == version:
                first, _, begin, _, _ = self._runs[uid]
            else:
                self._end_run(uid)
            self._runs[uid] = (first, entry.batch.time_s, begin, stop, version)

    def _end_run(self, uid: int) -> None:
        run = self._runs.pop(uid, None)
        if run is None:
            return
        entry, last_s, start, stop, version = run
        source = "given" if version == GIVEN else f"version {version}"
        detail = f"{start} to {stop}, {source}, in {last_s - entry.batch.time_s:.3f} s"
        self._write_note(entry, uid, "tokens", detail)

    def _note_trained(self, entry: Entry, state: LedgerState) -> None:
        for uid, step in self._settled:
            self._note(entry, uid, "trained", f"in step {_shown_step(step)}")
        self._settled.clear()
        for uid, is_noted in list(self._leased.items()):
            sample = state.sample(uid)
            if not is_noted and sample.state is SampleState.TRAINED:
                self._leased[uid] = True
                self._note(entry, uid, "trained", f"in step {_shown_step(sample.step)}")

    def _note_restored(self, entry: Entry, event: Restored, state: LedgerState) -> None:
        self._note_trained(entry, state)
        for step in [step for step in self._evaluations if step > event.step]:
            del self._evaluations[step]
        for uid in list(self._leased):
            if state.sample(uid).step is None:
                del self._leased[uid]
                self._note(entry, uid, "restored", f"not trained up to step {event.step}")
        for group in state.groups():
            for sample in group.samples:
                num_lost = sample.num_rolled_back - self._rolled_back.get(sample.uid, 0)
                if num_lost:
                    self._rolled_back[sample.uid] = sample.num_rolled_back
                    detail = f"{num_lost} tokens of later versions cut off"
                    self._note(entry, sample.uid, "rolled_back", detail)

    def _note_all(self, entry: Entry, uids: Iterable[int], event: str, detail: str) -> None:
        for uid in uids:
            self._note(entry, uid, event, detail)

    def _note(self, entry: Entry, uid: int | None, event: str, detail: str) -> None:
        if uid is not None:
            self._end_run(uid)
        self._write_note(entry, uid, event, detail)

    def _write_note(self, entry: Entry, uid: int | None, event: str, detail: str) -> None:
        self._add("history", uid, *entry.position, entry.batch.time_s, event, detail)

    def _add(self, table: str, *values: Any) -> None:
        rows = self._rows.setdefault(table, [])
        rows.append((self._manager, *values))
        if len(rows) >= _BUFFERED_ROWS:
            self._flush(table)

    def _flush(self, table: str) -> None:
        rows: Sequence[tuple[Any, ...]] = self._rows.pop(table)
        marks = ", ".join("?" * len(rows[0]))
        try:
            self._connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        except sqlite3.Error as error:
            raise LedgerError(f"the index of the ledger cannot be written: {error}") from error


def _shown_step(step: int | None) -> int | None:
    return None if step is None else step + 1
