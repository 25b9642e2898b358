"""Runs of tokens on their way to the samples of a `LedgerState`: checked in columns, sorted later.

Thousands of events have a few tokens each for hundreds of samples. Giving every run to its sample
at once would cost most of the time that a replay takes. Letters: S runs, N tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.ledger.ledger_events import GIVEN, Tokens, Uids
from umbra.runtime.rollout.ledger.sample_accounts import SampleState

MAX_TOKENS: Final = 1024 * 1024
"""Tokens that wait to be sorted. More take memory; fewer are sorted more often."""
_PHASES: Final = {SampleState.PENDING: 1, SampleState.PARTIAL: 1, SampleState.RUNNING: 2}
"""Tokens may be given to samples of phase 1 or 2, and generated for those of phase 2."""


class Run(NamedTuple):
    """Consecutive tokens of one sample and one version."""

    uid: int
    version: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class TokenRuns:
    """Knows of each sample what decides whether a run may follow, and keeps the runs. `num_tokens`
    counts those of runs that were not taken yet."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._events: list[Tokens] = []
        self._base = 0  # uid of the first slot
        self._phases = np.zeros(1024, np.int8)
        self._lengths = np.zeros(1024, np.int64)
        self._marks = np.zeros(1024, np.int64)

    def admit(self, uid: int, oldest_uid: int) -> None:
        """Makes room for `uid` and those from `oldest_uid` on."""
        num_slots = len(self._phases)
        if uid - self._base >= num_slots:
            kept = slice(oldest_uid - self._base, num_slots)
            self._base, num_slots = oldest_uid, max(num_slots, 2 * (uid - oldest_uid + 1))
            for name in ("_phases", "_lengths", "_marks"):
                old = getattr(self, name)[kept]
                setattr(
                    self, name, np.concatenate([old, np.zeros(num_slots - len(old), old.dtype)])
                )
        self.observe(uid, SampleState.PENDING, 0)

    def observe(self, uid: int, state: SampleState, num_tokens: int | None = None) -> None:
        """Takes the state of a sample, and its number of tokens unless runs imply it."""
        self._phases[uid - self._base] = _PHASES.get(state, 0)
        if num_tokens is not None:
            self._lengths[uid - self._base] = num_tokens

    def add(self, event: Tokens, versions: Collection[int]) -> bool:
        """Takes the runs if each may follow its sample's tokens, and no sample occurs twice."""
        slots = event.uids - self._base
        if not len(slots):
            return True
        if not 0 <= slots.min() <= slots.max() < len(self._phases):
            return False
        known = set(event.versions.tolist())
        fits = (
            all(version == GIVEN or version in versions for version in known)
            and bool((self._lengths[slots] == event.starts).all())
            and bool((self._phases[slots] >= np.where(event.versions == GIVEN, 1, 2)).all())
            and self._are_distinct(slots)
        )
        if fits:
            self.put(event)
        return fits

    def _are_distinct(self, slots: NDArray[np.int64]) -> bool:
        numbers = np.arange(len(slots))
        self._marks[slots] = numbers  # the last of equal ones stays
        return bool((self._marks[slots] == numbers).all())

    def put(self, event: Tokens) -> None:
        """Takes runs that were checked; those of one sample are in order."""
        self._lengths[event.uids - self._base] = event.starts + event.lengths
        self._events.append(event)
        self.num_tokens += len(event.tokens)

    def take(self) -> Iterator[Run]:
        """All runs, those of one sample and version joined as far as they are consecutive."""
        events, self._events, self.num_tokens = self._events, [], 0
        if not events:
            return
        order, uids, versions, last = sort_runs(events)
        lengths = np.concatenate([event.lengths for event in events])
        sources = (np.cumsum(lengths) - lengths)[order]
        lengths = lengths[order]
        stops = np.cumsum(lengths)
        shifts: NDArray[np.int64] = np.repeat(sources - stops + lengths, lengths)
        where = shifts + np.arange(int(stops[-1]))  # [N]
        tokens = np.concatenate([event.tokens for event in events])[where]
        logprobs = np.concatenate([event.logprobs for event in events])[where]
        begin = 0
        columns = (uids[last].tolist(), versions[last].tolist(), stops[last].tolist())
        for uid, version, stop in zip(*columns, strict=True):
            yield Run(uid, version, tokens[begin:stop], logprobs[begin:stop])
            begin = stop


def sort_runs(
    events: Sequence[Tokens],
) -> tuple[NDArray[np.int64], Uids, NDArray[np.int64], NDArray[np.int64]]:
    """The order by sample, [S]; uids and versions in this order; and the index there of the last of
    those runs that have sample and version in common."""
    uids = np.concatenate([event.uids for event in events])
    order = np.argsort(uids, kind="stable")
    uids, versions = uids[order], np.concatenate([event.versions for event in events])[order]
    ends = np.flatnonzero((np.diff(uids) != 0) | (np.diff(versions) != 0))
    return order, uids, versions, np.append(ends, len(uids) - 1)
