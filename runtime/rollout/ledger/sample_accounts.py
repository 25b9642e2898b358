"""The ledger's facts of one sample, and its contents.

PENDING -> RUNNING -> FINISHED -> SCORED -> LEASED -> TRAINED
   ^         |  ^                   |         |
   |         v  |                   +---------+---- a restored checkpoint does not include it
(reset)    PARTIAL
any but the last two -> DROPPED
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.rollout.ledger.ledger_events import GIVEN

T = TypeVar("T", bound=np.generic)

_INITIAL_CAPACITY: Final = 32
_NO_TOKENS: Final = np.empty(0, np.int32)
_NO_LOGPROBS: Final = np.empty(0, np.float32)


class SampleState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    PARTIAL = "partial"
    FINISHED = "finished"
    SCORED = "scored"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS: Final = {
    SampleState.PENDING: "waits for an engine",
    SampleState.RUNNING: "is being generated",
    SampleState.PARTIAL: "waits to be continued",
    SampleState.FINISHED: "waits for its reward",
    SampleState.SCORED: "waits for its step",
    SampleState.LEASED: "in training",
    SampleState.TRAINED: "trained",
    SampleState.DROPPED: "dropped",
}


class GroupRow(NamedTuple):
    """Facts that one prompt's samples have in common; fields as in `Admitted`."""

    first_uid: int
    group_id: str
    prompt_id: str
    epoch: int
    order_idx: int


@dataclass(slots=True, eq=False)
class SampleRow:
    """One sample."""

    group: GroupRow
    uid: int
    seed: int
    begin: int  # byte of the ledger, over all its parts, where the frame with the admission begins
    state: SampleState = SampleState.PENDING
    finished: int | None = None  # byte after the frame that finished it; None if it is not finished
    end: int | None = None  # byte after the frame that trained or dropped it
    finish_reason: str = ""
    drop_reason: str = ""
    drop_cause: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict[str, float])  # NaN: does not apply
    step: int | None = None  # from 0, that it was leased for or trained in
    num_tokens: int = 0
    interruptions: int = 0
    resets: int = 0
    rolled_back: int = 0
    segments: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def sample_id(self) -> str:
        return f"{self.group.group_id}/{self.uid - self.group.first_uid}"

    def runs(self) -> list[Segment]:
        """The completion as runs of equal version, in order."""
        stops = [*(start for start, _ in self.segments[1:]), self.num_tokens]
        return [
            Segment(start, stop, version)
            for (start, version), stop in zip(self.segments, stops, strict=False)
        ]

    def facts(self) -> dict[str, Any]:
        """Plain data for people. The step is counted from 1, as in metrics.jsonl."""
        return {
            "uid": self.uid,
            "sample_id": self.sample_id,
            "group_id": self.group.group_id,
            "prompt_id": self.group.prompt_id,
            "epoch": self.group.epoch,
            "place": self.group.order_idx,
            "seed": self.seed,
            "state": str(self.state),
            "finish_reason": self.finish_reason,
            "reward": self.reward,
            "reward_parts": {
                name: None if math.isnan(value) else value
                for name, value in self.reward_parts.items()
            },
            "step": None if self.step is None else self.step + 1,
            "drop_reason": self.drop_reason,
            "drop_detail": ": ".join(filter(None, (self.drop_reason, self.drop_cause))),
            "num_tokens": self.num_tokens,
            "interruptions": self.interruptions,
            "resets": self.resets,
            "rolled_back_tokens": self.rolled_back,
        }

    def extend(self, num_tokens: int, version: int) -> None:
        """Counts more tokens, all of one version."""
        if not self.segments or self.segments[-1][1] != version:
            self.segments.append((self.num_tokens, version))
        self.num_tokens += num_tokens

    def truncate(self, num_tokens: int) -> None:
        self.segments = [run for run in self.segments if run[0] < num_tokens]
        self.num_tokens = num_tokens

    def first_of(self, versions: Set[int]) -> int:
        """Index of the first token of one of these versions; `num_tokens` if there is none."""
        return next((start for start, of in self.segments if of in versions), self.num_tokens)


_COLUMNS: Final = tuple(column.name for column in fields(SampleRow))[1:]


def rows_to_wire(rows: Iterable[SampleRow]) -> list[Any]:
    held = list(rows)
    groups = {row.group.first_uid: row.group for row in held}
    of_group = [row.group.first_uid for row in held]
    return [list(groups.values()), of_group, *([getattr(r, c) for r in held] for c in _COLUMNS)]


def rows_from_wire(wire: list[Any]) -> list[SampleRow]:
    groups = {first_uid: GroupRow(first_uid, *rest) for first_uid, *rest in wire[0]}
    rows = [SampleRow(groups[of], *values) for of, *values in zip(*wire[1:], strict=True)]
    for row in rows:
        row.state = SampleState(row.state)
        row.segments = [(start, version) for start, version in row.segments]
    return rows


_STORED: Final = (
    "finish_reason",
    "drop_reason",
    "reward",
    "reward_parts",
    "step",
    "recorded",
    "interruptions",
    "resets",
    "reset_tokens",
    "rolled_back",
    "num_tokens",
    "is_released",
)


@dataclass(slots=True, eq=False)
class SampleAccount(SampleRow):
    """A sample with its contents; the bytes of the ledger are not known. Only `LedgerState` changes
    it."""

    prompt: NDArray[np.int32] | None = None  # the agent loop's, if it has one
    recorded: dict[str, Any] = field(default_factory=dict[str, Any])  # they survive resets
    teacher_logprobs: NDArray[np.float32] | None = None  # [num_tokens]
    reset_tokens: int = 0  # discarded by agent loops that started over
    is_released: bool = False  # contents are gone: it was dropped, or trained for good
    _tokens: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    _logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_LOGPROBS)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[num_tokens] the completion; empty once released."""
        return self._tokens[: self.num_tokens]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[num_tokens], as engines returned them; empty once released."""
        return self._logprobs[: self.num_tokens]

    @property
    def versions(self) -> NDArray[np.int64]:
        """[num_tokens] the version of each token, GIVEN if not generated."""
        lengths = [run.stop - run.start for run in self.runs()]
        return np.repeat(np.asarray([version for _, version in self.segments], np.int64), lengths)

    @property
    def num_generated(self) -> int:
        return sum(run.stop - run.start for run in self.runs() if run.version != GIVEN)

    def put(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Copies tokens behind the completion; `extend` must count them. Without effect if
        earlier ones are missing."""
        start, stop = self.num_tokens, self.num_tokens + len(tokens)
        if self.is_released or len(self._tokens) < start:
            return
        if stop > len(self._tokens):
            capacity = max(stop, 2 * len(self._tokens), _INITIAL_CAPACITY)
            self._tokens = _resized(self._tokens, start, capacity)
            self._logprobs = _resized(self._logprobs, start, capacity)
        self._tokens[start:stop] = tokens
        self._logprobs[start:stop] = logprobs

    def to_wire(self) -> list[Any]:
        """Plain data; uid, seed and group are known from the order."""
        values = [getattr(self, name) for name in _STORED]
        segments = [[run[k] for run in self.segments] for k in (0, 1)]
        arrays = [
            None if array is None else array.tobytes()
            for array in (self.prompt, self.teacher_logprobs, self.tokens, self.logprobs)
        ]
        return [*values, *segments, str(self.state), *arrays]

    def fill(self, stored: Sequence[Any]) -> None:
        *values, starts, versions, state, prompt, teacher, tokens, logprobs = stored
        for name, value in zip(_STORED, values, strict=True):
            setattr(self, name, value)
        self.segments = list(zip(starts, versions, strict=True))
        self.state = SampleState(state)
        self.prompt = None if prompt is None else np.frombuffer(prompt, np.int32)
        self.teacher_logprobs = None if teacher is None else np.frombuffer(teacher, np.float32)
        self._tokens = np.frombuffer(tokens, np.int32).copy()  # later tokens may replace some
        self._logprobs = np.frombuffer(logprobs, np.float32).copy()

    def release(self) -> None:
        """Forgets tokens, prompt and recorded values; segments and counts stay."""
        self.is_released = True
        self._tokens = _NO_TOKENS
        self._logprobs = _NO_LOGPROBS
        self.prompt = None
        self.teacher_logprobs = None
        self.recorded = {}


@dataclass(slots=True)
class Totals:
    """Counts over the whole history, including discarded work."""

    generated_tokens: int = 0
    given_tokens: int = 0
    rolled_back_tokens: int = 0
    reset_tokens: int = 0
    interruptions: int = 0
    resets: int = 0
    restores: int = 0


def _resized(array: NDArray[T], length: int, capacity: int) -> NDArray[T]:
    larger = np.empty(capacity, array.dtype)
    larger[:length] = array[:length]
    return larger
