"""Watches one actor's process from the supervisor: hung, blocked for too long, or too large."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgpack
import zmq

from umbra.runtime.process.child import resident_nbytes
from umbra.runtime.rpc.loop_socket import LoopSocket
from umbra.runtime.rpc.wire import Frame

logger = logging.getLogger(__name__)

# One ping a second: more often wakes idle actors, less often delays every verdict.
PING_INTERVAL_S: Final = 1.0
# A limit is measured by so many pings at least: with fewer, one late answer would decide.
_MIN_PINGS: Final = 4


class Watchdog:
    """Pings one incarnation and says when it has to be killed.

    Intervals are counted, not clock time, so a supervisor that was itself stopped for a while
    does not blame its children.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        pid: int,
        hung_limit_s: float,
        busy_limit_s: float,
        memory_limit_nbytes: int,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._pid = pid
        self._hung_limit_s = hung_limit_s
        self._busy_limit_s = busy_limit_s
        self._memory_limit_nbytes = memory_limit_nbytes
        self._interval_s = min(
            PING_INTERVAL_S, hung_limit_s / _MIN_PINGS, busy_limit_s / _MIN_PINGS
        )
        self._num_missed = 0
        self._loop_age_s = 0.0

    async def run(self) -> str:
        """Returns, as soon as there is one, the reason why the process must be killed."""
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket = LoopSocket(dealer, self._on_beat)
        try:
            dealer.connect(self._endpoint)
            while True:
                reason = self._verdict()
                if reason:
                    return reason
                self._num_missed += 1
                socket.send([b""])
                await asyncio.sleep(self._interval_s)
        finally:
            socket.close()

    def _on_beat(self, frames: list[Frame]) -> None:
        _incarnation, self._loop_age_s = msgpack.unpackb(frames[-1])
        self._num_missed = 0

    def _verdict(self) -> str:
        silent_s = self._num_missed * self._interval_s
        if silent_s > self._hung_limit_s:
            return f"no heartbeat for {silent_s:.3g} s: stopped, or wedged in native code"
        if self._loop_age_s > self._busy_limit_s:
            return (
                f"its event loop has been blocked for {self._loop_age_s:.0f} s "
                f"(busy_limit_s = {self._busy_limit_s:g})"
            )
        if self._memory_limit_nbytes:
            nbytes = resident_nbytes(self._pid)
            if nbytes > self._memory_limit_nbytes:
                return (
                    f"{nbytes / 2**20:.0f} MiB resident, above its memory limit of "
                    f"{self._memory_limit_nbytes / 2**20:.0f} MiB: raise the "
                    "limit (pool.memory_limit_mib for engines) or give it smaller batches"
                )
        return ""
