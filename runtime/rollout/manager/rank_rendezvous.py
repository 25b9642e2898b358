from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from umbra.runtime.errors import DeadlineExceeded, RolloutError
from umbra.runtime.waiting import Alarm

_LACKING_S: Final = 1.0
"""Interval of setting `lacking`. Ranks arrive within milliseconds of each other: shorter asks the
supervisor needlessly, longer leaves engines idle."""


class CollectiveCall(NamedTuple):
    """A call that all ranks make together; only calls for batches have a version."""

    call: str
    step: int
    temperature: float
    version: int | None = None

    def __str__(self) -> str:
        if self.call == "next_batch":
            return f"next_batch for step {self.step + 1}"
        return f"{self.call} after step {self.step}"


class RankRendezvous:
    """Holds the ranks of one collective call until all are answered together.

    Example of two ranks:
        rank 0  wait(0, next_batch 3) ......................... give -> answer 0
        rank 1          wait(1, next_batch 3)  (is_full) ...... give -> answer 1

    A rank may be missing for `timeout_s`; meanwhile `lacking` is set every `_LACKING_S`.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.lacking = asyncio.Event()
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._call: CollectiveCall | None = None
        self._slots: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._arrived_at: dict[int, float] = {}  # by rank, in loop time
        self._incomplete = Alarm(timeout_s, self._on_missing)
        self._lacking = Alarm(_LACKING_S, self._on_lacking)

    @property
    def is_full(self) -> bool:
        return len(self._slots) == self._world_size

    @property
    def waiting(self) -> frozenset[int]:
        return frozenset(self._slots)

    def waiting_ages_s(self) -> list[tuple[int, float]]:
        now = asyncio.get_running_loop().time()
        return [(rank, now - self._arrived_at[rank]) for rank in sorted(self._slots)]

    def arrive(self, rank: int, call: CollectiveCall) -> asyncio.Future[dict[str, Any]]:
        """Enters a rank into the call; returns the future of its answer, to be passed to `wait`.
        Raises RolloutError if the other ranks made another call; they get the error too."""
        if not 0 <= rank < self._world_size:
            raise ValueError(f"rank {rank} of {self._world_size}")
        if self._call is not None and self._call != call and self._slots.keys() - {rank}:
            others = ", ".join(str(other) for other in sorted(self._slots))
            error = RolloutError(
                f"rank {rank} called {call} while rank {others} called {self._call}: every "
                "rank must make the same calls in the same order"
            )
            self.fail(error)
            raise error
        self._call = call
        stale = self._slots.pop(rank, None)
        if stale is not None and not stale.done():
            stale.set_exception(RolloutError(f"rank {rank} called {call} again"))
        loop = asyncio.get_running_loop()
        slot = self._slots[rank] = loop.create_future()
        self._arrived_at[rank] = loop.time()
        self._watch()
        return slot

    async def wait(self, rank: int, slot: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
        """A caller that is cancelled leaves the call."""
        try:
            return await slot
        finally:
            if self._slots.get(rank) is slot:
                del self._slots[rank]
                self._close_if_empty()

    def give(self, call: CollectiveCall, answers: Sequence[dict[str, Any]]) -> None:
        """Answers the ranks that still wait in this call; one that left may ask for it alone."""
        if self._call == call:
            slots, self._slots = self._slots, {}
            self._close_if_empty()
            for rank, slot in slots.items():
                if not slot.done():
                    slot.set_result(answers[rank])

    def fail(self, error: Exception) -> None:
        slots, self._slots = self._slots, {}
        self._close_if_empty()
        for slot in slots.values():
            if not slot.done():
                slot.set_exception(error)

    def _close_if_empty(self) -> None:
        if not self._slots:
            self._call = None
        self._watch()

    def _watch(self) -> None:
        lacks_some = bool(self._slots) and not self.is_full
        self._incomplete.watch(lacks_some)
        self._lacking.watch(lacks_some)

    def _on_lacking(self) -> None:
        self.lacking.set()
        self._lacking.watch(True)  # again while ranks are missing

    def _on_missing(self) -> None:
        missing = sorted(set(range(self._world_size)) - self._slots.keys())
        self.fail(
            DeadlineExceeded(
                f"rank {', '.join(map(str, missing))} did not call {self._call} within "
                f"{self._timeout_s:.3g} s of the others: it hangs, died, or took another path"
            )
        )
