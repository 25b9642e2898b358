from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

from umbra.runtime.cluster.run_events import Notify
from umbra.runtime.process.descendants import process_stat

logger = logging.getLogger(__name__)

# Events that a rank has not read yet. A rank reads on a thread of its own, so only a stopped one
# falls behind; then it loses notes, but never failures.
_MAX_UNREAD_EVENTS: Final = 1000
# Interval of looks at whether a signal has stopped a rank, which only its parent notices, and looks
# in a row before it is reported. More report late; fewer report ranks that debugging tools stop.
_LOOK_INTERVAL_S: Final = 1.0
_NUM_LOOKS: Final = 2


class AttachedRank:
    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.num_stopped = 0  # looks in a row that found it stopped
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    def put(self, event: dict[str, Any]) -> None:
        if self.events.qsize() < _MAX_UNREAD_EVENTS or event["kind"] != "note":
            self.events.put_nowait(event)


class AttachedRanks:
    """The ranks attached to a supervisor, and the events that all, even later ones, receive.
    `on_event` gets the loss of the job and a stop signal, once each. torchrun counts the
    `incarnation`."""

    def __init__(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._on_event = on_event
        self.incarnation = 1
        self._ranks: dict[int, AttachedRank] = {}
        self._detached: set[int] = set()
        self.failed = asyncio.Event()
        self.attached = asyncio.Event()
        self._failure: dict[str, Any] | None = None
        self._signal: dict[str, Any] | None = None
        self._nodes: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def failure(self) -> str:
        return "" if self._failure is None else self._failure["message"]

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def was_stopped(self) -> bool:
        return self._signal is not None

    @property
    def num_detached(self) -> int:
        return len(self._detached)

    def add(self, rank: int, pid: int, **details: Any) -> AttachedRank:
        me = self._ranks[rank] = AttachedRank(rank, pid)
        self._detached.discard(rank)
        self.attached.set()
        me.put({"kind": "attached", **details})
        for event in (self._nodes, self._failure, self._signal):
            if event is not None:
                me.put(event)
        return me

    def remove(self, gone: AttachedRank) -> bool:
        """Returns False if another process is that rank by now, or the ranks were restarted."""
        if self._ranks.get(gone.rank) is not gone:
            return False
        del self._ranks[gone.rank]
        if not self._ranks:
            self.attached.clear()
        return True

    def detach(self, rank: int) -> None:
        self._detached.add(rank)
        if rank in self._ranks:
            self._ranks[rank].put({"kind": "detached"})

    def has_detached(self, rank: int) -> bool:
        return rank in self._detached

    def all(self) -> list[AttachedRank]:
        return list(self._ranks.values())

    def start_over(self, incarnation: int) -> list[int]:
        """Begins with new ranks, without old failures; returns old ranks that still run."""
        self.incarnation = incarnation
        self._failure = None
        self.failed.clear()
        self._signal = None
        self._detached.clear()
        unseen = list(self._ranks)
        self._ranks.clear()
        self.attached.clear()
        return unseen

    def fail(self, who: str, message: str) -> None:
        """Marks the job as lost and reports it to every rank; the first failure counts."""
        self.fail_as(f"{who} failed: {message}")

    def fail_as(self, message: str) -> None:
        if self._failure is None:
            self.failed.set()
            logger.error("%s", message)
            self._failure = {"kind": "failed", "message": message}
            for rank in self._ranks.values():
                rank.put(self._failure)
            self._on_event(self._failure)

    def pass_on_signal(
        self, cause: str, incarnation: int, number: int, grace_s: float | None = None
    ) -> bool:
        """Sends every rank a stop signal that the job got; returns whether it is the first one.

        Only the first counts, except that a later request with `grace_s` limits an unlimited stop.
        When ranks have failed, torchrun ends the others by a signal, which concerns neither them
        nor the ranks started in their place. `cause` is such as "the supervisor got SIGTERM".
        """
        before = self._signal
        is_limit = before is not None and before["grace_s"] is None and grace_s is not None
        if not (before is None or is_limit) or self.has_failed or incarnation != self.incarnation:
            return False
        self._signal = {"kind": "signal", "number": number, "grace_s": grace_s, "cause": cause}
        logger.info("%s: stopping all ranks", cause)
        for rank in self._ranks.values():
            rank.put(self._signal)
        self._on_event(self._signal)
        return before is None

    async def await_failure(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.failed.wait()

    def tell_nodes(self, nodes: list[dict[str, Any]], epoch: int) -> None:
        self._nodes = {"kind": "nodes", "nodes": nodes, "epoch": epoch}
        for rank in self._ranks.values():
            rank.put(self._nodes)

    def forget_nodes(self) -> None:
        self._nodes = None

    async def watch_stops(self, notify: Notify) -> None:
        """Reports each rank that a signal stops or continues, until cancelled. A stopped rank is
        not lost: the job waits for it, as long as its deadlines allow."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            for rank in self.all():
                _look_whether_stopped(rank, notify)

    def note(self, text: str) -> None:
        logger.info("%s", text)
        for rank in self._ranks.values():
            rank.put({"kind": "note", "text": text})


def _look_whether_stopped(rank: AttachedRank, notify: Notify) -> None:
    stat, who = process_stat(rank.pid), f"rank {rank.rank}"
    if stat is not None and stat.is_stopped:
        rank.num_stopped += 1
        if rank.num_stopped == _NUM_LOOKS:
            text = f"is {stat.why_stuck}: kill -CONT {rank.pid} lets it continue"
            notify(f"{rank.name} {text}", "fault", who)
        return
    if rank.num_stopped >= _NUM_LOOKS:
        stopped_s = rank.num_stopped * _LOOK_INTERVAL_S
        notify(f"{rank.name} continues, after {stopped_s:.0f} s", "note", who)
    rank.num_stopped = 0
