"""The ledger's state of one sample and of one group, and the contents of chosen samples.

PENDING -> RUNNING -> FINISHED -> SCORED -> LEASED -> TRAINED
   ^         |  ^                   |         |
   |         v  |                   +---------+---- a restored checkpoint does not include it
(reset)    PARTIAL
any but the last two -> DROPPED
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.dispatch.token_store import Segment
from umbra.runtime.rollout.ledger.ledger_events import (
    GIVEN,
    Event,
    PromptGiven,
    Recorded,
    Reset,
    TeacherLogprobs,
    Tokens,
)

T = TypeVar("T", bound=np.generic)

_INITIAL_CAPACITY: Final = 32
_NO_TOKENS: Final = np.empty(0, np.int32)
_NO_LOGPROBS: Final = np.empty(0, np.float32)
_OF_GROUP: Final = ("first_uid", "group_id", "prompt_id", "epoch", "order_idx")
_STORED: Final = (
    "finish_reason",
    "drop_reason",
    "reward",
    "reward_parts",
    "step",
    "recorded",
    "num_interruptions",
    "num_resets",
    "num_reset_tokens",
    "num_rolled_back",
    "num_tokens",
    "is_released",
    "_run_starts",
    "_run_versions",
)


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

_DONE: Final = frozenset({SampleState.TRAINED, SampleState.DROPPED})


class SampleAccount:
    """One sample. Only `LedgerState` changes it."""

    __slots__ = (
        "_logprobs",
        "_run_starts",
        "_run_versions",
        "_tokens",
        "drop_reason",
        "finish_reason",
        "group",
        "is_released",
        "num_interruptions",
        "num_reset_tokens",
        "num_resets",
        "num_rolled_back",
        "num_tokens",
        "prompt",
        "recorded",
        "reward",
        "reward_parts",
        "state",
        "step",
        "teacher_logprobs",
        "uid",
    )

    def __init__(self, uid: int, group: GroupAccount) -> None:
        self.uid = uid
        self.group = group
        self.state = SampleState.PENDING
        self.finish_reason = ""
        self.drop_reason = ""
        self.reward: float | None = None
        self.reward_parts: dict[str, float] = {}  # NaN where one does not apply
        self.teacher_logprobs: NDArray[np.float32] | None = None  # [num_tokens]
        self.step: int | None = None  # from 0, that it was leased for or trained in
        self.prompt: NDArray[np.int32] | None = None  # the agent loop's, if it has one
        self.recorded: dict[str, Any] = {}  # values of `ctx.once`; they survive resets
        self.num_interruptions = 0
        self.num_resets = 0
        self.num_reset_tokens = 0  # tokens discarded by agent loops that started over
        self.num_rolled_back = 0  # tokens cut off by restored checkpoints
        self.num_tokens = 0
        self.is_released = False  # tokens are gone: it was dropped, or trained for good
        self._tokens = _NO_TOKENS
        self._logprobs = _NO_LOGPROBS
        self._run_starts: list[int] = []
        self._run_versions: list[int] = []

    @property
    def sample_idx(self) -> int:
        return self.uid - self.group.first_uid

    @property
    def sample_id(self) -> str:
        return f"{self.group.group_id}/{self.sample_idx}"

    @property
    def seed(self) -> int:
        return int(self.group.seeds[self.sample_idx])

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[num_tokens] the completion; empty once released."""
        return self._tokens[: self.num_tokens]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[num_tokens], as engines returned them; empty once released."""
        return self._logprobs[: self.num_tokens]

    @property
    def has_tokens(self) -> bool:
        return len(self._tokens) >= self.num_tokens

    @property
    def versions(self) -> NDArray[np.int64]:
        """[num_tokens] the version of each token, GIVEN if not generated."""
        bounds = [*self._run_starts, self.num_tokens]
        return np.repeat(np.asarray(self._run_versions, np.int64), np.diff(bounds))

    @property
    def num_generated(self) -> int:
        return sum(run.stop - run.start for run in self.segments() if run.version != GIVEN)

    def segments(self) -> list[Segment]:
        """The completion as runs of equal version, in order; available after `release`, too."""
        bounds = pairwise([*self._run_starts, self.num_tokens])
        return [
            Segment(start, stop, version)
            for (start, stop), version in zip(bounds, self._run_versions, strict=True)
        ]

    def append(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Adds a copy of a run of tokens."""
        start, stop = self.num_tokens, self.num_tokens + len(tokens)
        if stop > len(self._tokens):
            capacity = max(stop, 2 * len(self._tokens), _INITIAL_CAPACITY)
            self._tokens = _resized(self._tokens, start, capacity)
            self._logprobs = _resized(self._logprobs, start, capacity)
        self._tokens[start:stop] = tokens
        self._logprobs[start:stop] = logprobs
        self.count(len(tokens), version)

    def count(self, num_tokens: int, version: int) -> None:
        if not self._run_versions or self._run_versions[-1] != version:
            self._run_starts.append(self.num_tokens)
            self._run_versions.append(version)
        self.num_tokens += num_tokens

    def truncate(self, num_tokens: int) -> None:
        while self._run_starts and self._run_starts[-1] >= num_tokens:
            self._run_starts.pop()
            self._run_versions.pop()
        self.num_tokens = num_tokens

    def first_of(self, versions: set[int]) -> int:
        """Index of the first token of one of these versions; `num_tokens` if there is none."""
        for start, version in zip(self._run_starts, self._run_versions, strict=True):
            if version in versions:
                return start
        return self.num_tokens

    def to_wire(self) -> list[Any]:
        """Plain data; uid and group are known from the order."""
        values = [getattr(self, name) for name in _STORED]
        arrays = [
            None if array is None else array.tobytes()
            for array in (self.prompt, self.teacher_logprobs, self.tokens, self.logprobs)
        ]
        return [*values, str(self.state), *arrays]

    def fill(self, stored: Sequence[Any]) -> None:
        *values, state, prompt, teacher, tokens, logprobs = stored
        for name, value in zip(_STORED, values, strict=True):
            setattr(self, name, value)
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


class GroupAccount:
    __slots__ = ("epoch", "first_uid", "group_id", "order_idx", "prompt_id", "samples", "seeds")

    def __init__(
        self,
        *,
        first_uid: int,
        group_id: str,
        prompt_id: str,
        epoch: int,
        order_idx: int,
        seeds: NDArray[np.int64],
    ) -> None:
        self.first_uid = first_uid
        self.group_id = group_id
        self.prompt_id = prompt_id
        self.epoch = epoch
        self.order_idx = order_idx
        self.seeds = seeds  # [G]
        self.samples: Sequence[SampleAccount] = tuple(
            SampleAccount(first_uid + k, self) for k in range(len(seeds))
        )

    @property
    def is_settled(self) -> bool:
        """Whether nothing can happen to it any more."""
        return all(sample.is_released for sample in self.samples)

    @property
    def is_done(self) -> bool:
        """Whether nothing can happen to it any more, unless the job goes back to a checkpoint."""
        return all(sample.state in _DONE for sample in self.samples)

    def to_wire(self) -> list[Any]:
        """Plain data, without its samples."""
        return [getattr(self, name) for name in _OF_GROUP] + [self.seeds.tolist()]

    @classmethod
    def from_wire(cls, stored: Sequence[Any]) -> GroupAccount:
        *values, seeds = stored
        named = dict(zip(_OF_GROUP, values, strict=True))
        return cls(seeds=np.asarray(seeds, np.int64), **named)


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


class SampleContent:
    """One sample's completion, the prompt of its agent loop if that replaced the data set's, and
    the loop's records, which survive resets.

    `LedgerState` drops the tokens of samples that can no longer change. Here they are read again,
    for a few samples only, so that memory does not grow with the ledger. `logprobs` are None for
    samples whose part of the log was removed.
    """

    def __init__(self) -> None:
        self.prompt: NDArray[np.int32] | None = None
        self.recorded: dict[str, Any] = {}
        self.tokens: NDArray[np.int32] = _NO_TOKENS
        self.logprobs: NDArray[np.float32] | None = None
        self.teacher_logprobs: NDArray[np.float32] | None = None  # None without a teacher, too


def read_contents(
    events: Iterable[Event], num_tokens: Mapping[int, int]
) -> dict[int, SampleContent]:
    """The contents of samples at the end of a history that `LedgerState` accepts. `num_tokens` has
    the final number of tokens of each wanted sample, by uid: a rollback or reset after a sample's
    last tokens is known only from it."""
    contents = {uid: SampleContent() for uid in num_tokens}
    completions = _Completions(num_tokens)
    for event in events:
        match event:
            case Tokens():
                completions.put(event)
            case PromptGiven(uid=uid) if uid in contents:
                contents[uid].prompt = event.tokens.copy()  # not a view of a whole frame
            case Reset(uid=uid) if uid in contents:
                contents[uid].prompt = None
            case Recorded(uid=uid) if uid in contents:
                contents[uid].recorded[event.key] = event.value
            case TeacherLogprobs(uid=uid) if uid in contents:
                contents[uid].teacher_logprobs = event.logprobs.copy()
            case _:
                pass
    for uid, tokens, logprobs in completions.items():
        contents[uid].tokens, contents[uid].logprobs = tokens, logprobs
    return contents


class _Completions:
    """The completions of W samples, one behind the other."""

    def __init__(self, num_tokens: Mapping[int, int]) -> None:
        uids = sorted(num_tokens)
        self._uids = np.asarray(uids, np.int64)  # [W]
        self._lengths = np.asarray([num_tokens[uid] for uid in uids], np.int64)
        self._ends = np.cumsum(self._lengths)
        self._tokens = np.zeros(self._lengths.sum(), np.int32)
        self._logprobs = np.zeros(len(self._tokens), np.float32)

    def put(self, event: Tokens) -> None:
        """A start before the end follows a rollback or a reset: later runs replace earlier ones."""
        if not len(self._uids):
            return
        slots = np.searchsorted(self._uids, event.uids)
        runs = np.flatnonzero(self._uids.take(slots, mode="clip") == event.uids)
        slots = slots[runs]
        starts, offsets = event.starts[runs], event.offsets[runs]
        room = (self._lengths[slots] - starts).clip(min=0)
        lengths = np.minimum(event.offsets[runs + 1] - offsets, room)
        ends = np.cumsum(lengths)
        shifts: NDArray[np.int64] = np.repeat(lengths - ends, lengths)
        at = shifts + np.arange(len(shifts))  # of each token in its run
        targets = self._ends[slots] - room  # where a run begins, unless it has no room
        sources = np.repeat(offsets, lengths) + at
        at += np.repeat(targets, lengths)
        self._tokens[at], self._logprobs[at] = event.tokens[sources], event.logprobs[sources]

    def items(self) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.float32]]]:
        columns = (self._uids.tolist(), self._lengths.tolist(), self._ends.tolist())
        for uid, length, end in zip(*columns, strict=True):
            own = slice(end - length, end)
            yield uid, self._tokens[own], self._logprobs[own]
