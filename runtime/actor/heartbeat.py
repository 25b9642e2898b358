"""Distinguishes a hung actor from a busy one.

A thread of each actor answers pings on a socket of its own and reports how long ago the actor's
event loop last ticked. No answer: the process is stopped, or stuck in C code that holds the
interpreter. An old tick: the loop is blocked, and counts as hung after `busy_limit_s`. An actor
that works outside its loop (an engine) also reports whether it makes progress.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgpack
import zmq

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.errors import ProtocolError
from umbra.runtime.process.descendants import ProcessTree
from umbra.runtime.rpc.loop_socket import LoopSocket
from umbra.runtime.rpc.wire import Frame

# A longer interval blurs the loop's age, a shorter one wakes idle actors.
TICK_INTERVAL_S: Final = 0.25
# The most that a tick adds to a stall. More would count time in which this process was stopped;
# less counts too little if the loop is often late.
_MOST_PER_TICK_S: Final = 1.0

# More frequent pings wake idle actors, rarer ones delay every verdict.
PING_INTERVAL_S: Final = 1.0
# Every limit covers at least this many pings: with fewer, one late answer would decide.
_MIN_PINGS: Final = 4
# An engine's process may be stopped by a signal for this long. A longer limit keeps its requests
# waiting; a shorter one kills it when a debugging tool stops it for a moment.
_STOPPED_LIMIT_S: Final = 3.0
# Pings between two searches for new processes, which take milliseconds where threads are many.
_LOOK_EVERY: Final = 10


class Beat(NamedTuple):
    """The answer to a ping. `loop_age_s` is the time since the actor's loop last ticked;
    `stalled_s` is `LoopTicker.stalled_s`."""

    incarnation: int
    loop_age_s: float
    stalled_s: float

    def encode(self) -> bytes:
        data: bytes = msgpack.packb(self)
        return data

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Beat:
        try:
            fields: Any = msgpack.unpackb(data)
        except Exception as error:  # malformed msgpack fails in many ways
            raise ProtocolError(f"undecodable heartbeat: {type(error).__name__}") from error
        match fields:
            case [int() as incarnation, float() as loop_age_s, float() as stalled_s]:
                return cls(incarnation, loop_age_s, stalled_s)
            case _:
                raise ProtocolError("a heartbeat must be [incarnation, loop_age_s, stalled_s]")


class LoopTicker:
    """Records the time whenever the loop runs. Owned by the actor host.

    Args:
        progress: None while the actor is idle; else a value that changes as it makes progress.

    Attributes:
        stalled_s: how long there has been work and no change.
    """

    def __init__(self, progress: Callable[[], object] | None = None) -> None:
        self.last_tick = time.monotonic()
        self.stalled_s = 0.0
        self._progress = progress

    async def run(self) -> None:
        last_mark: object = None
        while True:
            now = time.monotonic()
            passed_s = min(now - self.last_tick, _MOST_PER_TICK_S)
            self.last_tick = now
            mark = None if self._progress is None else self._progress()
            is_stalled = mark is not None and mark == last_mark
            self.stalled_s = self.stalled_s + passed_s if is_stalled else 0.0
            last_mark = mark
            await asyncio.sleep(TICK_INTERVAL_S)


class HeartbeatResponder:
    """The answering thread, which leaving the context ends."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        incarnation: int,
        ticker: LoopTicker,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._ticker = ticker
        self._stop = context.socket(zmq.PAIR)
        self._stop_endpoint = f"inproc://heartbeat-{id(self)}"
        self._stop.bind(self._stop_endpoint)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._thread = threading.Thread(target=self._answer, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._stop.send(b"")
        self._thread.join(timeout=2.0)
        self._stop.close(linger=0)

    def _answer(self) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect(self._stop_endpoint)
        poller = zmq.Poller()
        poller.register(stop, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if stop in ready:
                    return
                frames = self._socket.recv_multipart()
                age_s = time.monotonic() - self._ticker.last_tick
                beat = Beat(self._incarnation, age_s, self._ticker.stalled_s)
                self._socket.send_multipart([frames[0], beat.encode()])
        finally:
            stop.close(linger=0)
            self._socket.close(linger=0)


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
