"""Runs of tokens on their way to their samples: checked in columns, sorted later.

Thousands of events have a few tokens each for hundreds of samples. Giving every run to its sample
at once would cost most of the time that a replay takes. Letters: S runs, J joined runs, N tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import GIVEN, Tokens, Uids
from umbra.runtime.rollout.ledger.sample_accounts import SampleState

MAX_TOKENS: Final = 1024 * 1024
"""Tokens that wait to be sorted. More take memory; fewer are sorted more often."""
_PHASES: Final = {SampleState.PENDING: 1, SampleState.PARTIAL: 1, SampleState.RUNNING: 2}
"""Tokens may be given to samples of phase 1 or 2, and generated for those of phase 2."""


class RunColumns:
    """The facts that decide whether a run of tokens may follow in a sample, by slot, which is its
    uid less a base."""

    def __init__(self) -> None:
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

    def put(self, event: Tokens) -> None:
        """Takes runs that were checked; those of one sample are in order."""
        self._lengths[event.uids - self._base] = event.starts + event.lengths

    def fit(self, event: Tokens, versions: Collection[int]) -> bool:
        """Whether each run may follow its sample's tokens, and no sample occurs twice."""
        slots = event.uids - self._base
        if not len(slots):
            return True
        if not 0 <= slots.min() <= slots.max() < len(self._phases):
            return False
        known = set(event.versions.tolist())
        return (
            all(version == GIVEN or version in versions for version in known)
            and bool((self._lengths[slots] == event.starts).all())
            and bool((self._phases[slots] >= np.where(event.versions == GIVEN, 1, 2)).all())
            and self._are_distinct(slots)
        )

    def _are_distinct(self, slots: NDArray[np.int64]) -> bool:
        numbers = np.arange(len(slots))
        self._marks[slots] = numbers  # the last of equal ones stays
        return bool((self._marks[slots] == numbers).all())


class JoinedRuns:
    """The runs of events by sample, those of one version joined as far as they are consecutive.
    Iterates over uid, number of tokens and version of each. At least one event must have a run.

    Attributes:
        num_given, num_generated: tokens of all runs.
    """

    def __init__(self, events: Sequence[Tokens]) -> None:
        uids: Uids = np.concatenate([event.uids for event in events])
        self._order = np.argsort(uids, kind="stable")  # [S]
        uids = uids[self._order]
        versions = np.concatenate([event.versions for event in events])[self._order]
        ends = np.flatnonzero((np.diff(uids) != 0) | (np.diff(versions) != 0))
        self._lasts = np.append(ends, len(uids) - 1)  # [J] of each joined run's runs
        self._events = events
        self._lengths = np.concatenate([event.lengths for event in events])[self._order]  # [S]
        stops = np.cumsum(self._lengths)[self._lasts]
        self._uids = uids[self._lasts].tolist()
        self._versions = versions[self._lasts]
        self._num_tokens = np.diff(stops, prepend=0)
        self.num_given = int(self._num_tokens[self._versions == GIVEN].sum())
        self.num_generated = int(stops[-1]) - self.num_given

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self._uids, self._num_tokens.tolist(), self._versions.tolist(), strict=True)

    def starts(self) -> list[int]:
        """[J] indexes of their first tokens in the completions. Raises LedgerError if tokens are
        missing inside of one."""
        starts = np.concatenate([event.starts for event in self._events])[self._order]
        is_torn = starts[1:] != (starts + self._lengths)[:-1]
        is_torn[self._lasts[:-1]] = False
        if is_torn.any():
            uid = self._uids[np.searchsorted(self._lasts, np.argmax(is_torn))]
            raise LedgerError(f"tokens of the sample with uid {uid} are missing")
        return starts[np.append(0, self._lasts[:-1] + 1)].tolist()

    def contents(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """[N] tokens and logprobs of one after the other."""
        lengths = np.concatenate([event.lengths for event in self._events])
        sources = (np.cumsum(lengths) - lengths)[self._order]
        lengths = self._lengths
        shifts: NDArray[np.int64] = np.repeat(sources - np.cumsum(lengths) + lengths, lengths)
        where = shifts + np.arange(len(shifts))
        tokens = np.concatenate([event.tokens for event in self._events])[where]
        logprobs = np.concatenate([event.logprobs for event in self._events])[where]
        return tokens, logprobs
