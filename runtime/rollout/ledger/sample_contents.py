"""The contents of chosen samples, read again from events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.ledger.ledger_events import (
    Event,
    PromptGiven,
    Recorded,
    Reset,
    TeacherLogprobs,
    Tokens,
)


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
        self.tokens: NDArray[np.int32] = np.empty(0, np.int32)
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
