from __future__ import annotations

import asyncio
from typing import Final

import zmq

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.heartbeat import Beat
from umbra.runtime.process.process_tree import ProcessTree
from umbra.runtime.rpc.loop_socket import LoopSocket
from umbra.runtime.rpc.wire import Frame

# More frequent pings wake idle actors, rarer ones delay every verdict.
PING_INTERVAL_S: Final = 1.0
# Every limit covers at least this many pings: with fewer, one late answer would decide.
_MIN_PINGS: Final = 4
# An engine's process may be stopped by a signal for this long. A longer limit keeps its requests
# waiting; a shorter one kills it when a debugging tool stops it for a moment.
_STOPPED_LIMIT_S: Final = 3.0
# Pings between two searches for new processes, which take milliseconds where threads are many.
_LOOK_EVERY: Final = 10


class Watchdog:
    """Watches one actor's processes and decides when they must be killed: hung, blocked, stalled,
    large. It counts pings, not clock time, so that a supervisor that was itself stopped for a while
    does not blame its children."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        pid: int,
        spec: ActorSpec,
    ) -> None:
        self.tree = ProcessTree(pid)
        self._context = context
        self._endpoint = endpoint
        self._spec = spec
        self._interval_s = min(
            PING_INTERVAL_S, spec.hung_limit_s / _MIN_PINGS, spec.busy_limit_s / _MIN_PINGS
        )
        self._num_missed = 0
        self._num_stopped = 0  # pings in a row that found a process stopped
        self._loop_age_s = 0.0
        self._stalled_s = 0.0

    async def run(self) -> str:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket = LoopSocket(dealer, self._on_beat, sender=f"{self._spec.name}'s heartbeat")
        looks_at_tree = self._spec.role == "engine" or self._spec.memory_limit_nbytes > 0
        num_pings = 0
        try:
            dealer.connect(self._endpoint)
            while True:
                if looks_at_tree and num_pings % _LOOK_EVERY == 0:
                    self.tree.look()
                reason = self._verdict()
                if reason:
                    return reason
                self._num_missed += 1
                num_pings += 1
                socket.send([b""])
                await asyncio.sleep(self._interval_s)
        finally:
            socket.close()

    def _on_beat(self, frames: list[Frame]) -> None:
        _incarnation, self._loop_age_s, self._stalled_s = Beat.decode(frames[-1])
        self._num_missed = 0

    def _verdict(self) -> str:
        return self._hung() or self._stalled() or self._too_large()

    def _hung(self) -> str:
        silent_s = self._num_missed * self._interval_s
        if silent_s > self._spec.hung_limit_s:
            return f"no heartbeat for {silent_s:.3g} s"
        if self._loop_age_s > self._spec.busy_limit_s:
            return (
                f"its event loop has been blocked for {self._loop_age_s:.0f} s "
                f"(busy_limit_s = {self._spec.busy_limit_s:g})"
            )
        return ""

    def _stalled(self) -> str:
        limit_s = self._spec.stall_limit_s
        if not limit_s:
            return ""
        if self._stalled_s > limit_s:
            return (
                f"it has had requests for {self._stalled_s:.3g} s and made no token "
                f"(pool.stall_limit_s = {limit_s:g}): its model's process hangs; if a first "
                "token may take longer, raise the limit"
            )
        self._num_stopped = self._num_stopped + 1 if self.tree.stopped_pids() else 0
        stopped_s = (self._num_stopped - 1) * self._interval_s
        if stopped_s >= min(_STOPPED_LIMIT_S, self._spec.hung_limit_s):
            return f"it did not continue within {stopped_s:.3g} s"
        return ""

    def _too_large(self) -> str:
        limit_nbytes = self._spec.memory_limit_nbytes
        nbytes = self.tree.resident_nbytes() if limit_nbytes else 0
        if nbytes <= limit_nbytes:
            return ""
        return (
            f"{nbytes / 2**20:.0f} MiB resident, above its memory limit of "
            f"{limit_nbytes / 2**20:.0f} MiB: raise the "
            "limit (pool.memory_limit_mib for engines) or give it smaller batches"
        )
