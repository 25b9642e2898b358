"""The ranks that are attached to a supervisor, and what all of them are told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import Any, Final

from umbra.runtime.cluster.gpu_shortage import RankMemory

logger = logging.getLogger(__name__)

# Notes a rank has not read yet. A rank reads on a thread of its own, so only a stopped one
# falls behind; then further notes are lost, failures never.
_MAX_UNREAD_EVENTS: Final = 1000


class AttachedRank:
    """One of them, and the events it has not read yet."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.gpu_memory: RankMemory | None = None
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def put(self, event: dict[str, Any]) -> None:
        if self.events.qsize() < _MAX_UNREAD_EVENTS or event["kind"] != "note":
            self.events.put_nowait(event)


class AttachedRanks:
    """Owned by the supervisor.

    Attributes:
        incarnation: of the ranks, counted by torchrun.
        has_failed: the job is lost; every rank has been told, and later ones are.
    """

    def __init__(self) -> None:
        self.incarnation = 1
        self._ranks: dict[int, AttachedRank] = {}
        self._farewells: set[int] = set()
        self._failure: dict[str, Any] | None = None
        self._failed = asyncio.Event()
        self._signal: dict[str, Any] | None = None
        self._came = asyncio.Event()
        self._gone = asyncio.Event()  # all of them

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def num_farewells(self) -> int:
        return len(self._farewells)

    def add(self, rank: int, pid: int) -> AttachedRank:
        me = self._ranks[rank] = AttachedRank(rank, pid)
        self._farewells.discard(rank)
        self._came.set()
        self._gone.clear()
        me.put({"kind": "attached"})
        for event in (self._failure, self._signal):
            if event is not None:
                me.put(event)
        return me

    def remove(self, gone: AttachedRank) -> bool:
        """False where another process is that rank by now, or the ranks were restarted since."""
        if self._ranks.get(gone.rank) is not gone:
            return False
        del self._ranks[gone.rank]
        self._tell_gone()
        return True

    def _tell_gone(self) -> None:
        if not self._ranks:
            self._came.clear()
            self._gone.set()

    def say_farewell(self, rank: int) -> None:
        """Its stream of events ends, and it is not missed."""
        self._farewells.add(rank)
        if rank in self._ranks:
            self._ranks[rank].put({"kind": "detached"})

    def has_said_farewell(self, rank: int) -> bool:
        return rank in self._farewells

    def all(self) -> list[AttachedRank]:
        return list(self._ranks.values())

    def note_gpu_memory(self, rank: int, memory: RankMemory) -> None:
        """What it has just reported."""
        if rank in self._ranks:
            self._ranks[rank].gpu_memory = memory

    def start_over(self, incarnation: int) -> list[int]:
        """What the old ones failed at and said means nothing any more, nor that they go.

        Returns:
            Those that were not seen to go.
        """
        self.incarnation = incarnation
        self._failure = None
        self._failed.clear()
        self._signal = None
        self._farewells.clear()
        unseen = list(self._ranks)
        self._ranks.clear()
        self._tell_gone()
        return unseen

    def fail(self, who: str, message: str) -> None:
        """The job is lost. Every rank is told; the first failure counts."""
        if self._failure is None:
            self._failed.set()
            logger.error("%s failed: %s", who, message)
            self._failure = {"kind": "failed", "message": f"{who} failed: {message}"}
            for rank in self._ranks.values():
                rank.put(self._failure)

    def pass_on_signal(self, receiver: str, incarnation: int, number: int) -> None:
        """Every rank hears of a stop signal that some process of the job got, once.

        torchrun, too, ends what is left of failed ranks by a signal: that concerns neither them nor
        those that it starts in their place.
        """
        if self._signal is not None or self.has_failed or incarnation != self.incarnation:
            return
        self._signal = {"kind": "signal", "number": number}
        name = signal.Signals(number).name
        logger.info("%s got %s: all ranks are to stop", receiver, name)
        for rank in self._ranks.values():
            rank.put(self._signal)

    async def await_failure(self, limit_s: float) -> None:
        """Until the job is lost, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._failed.wait()

    def note(self, text: str) -> None:
        """Puts one line where the person who runs the job sees it."""
        logger.info("%s", text)
        for rank in self._ranks.values():
            rank.put({"kind": "note", "text": text})

    async def until_abandoned(self, limit_s: float) -> None:
        """Until no rank has been attached for so long."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(limit_s):
                    await self._came.wait()
                await self._gone.wait()
