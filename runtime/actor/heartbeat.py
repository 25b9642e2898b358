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

from umbra.runtime.errors import ProtocolError

# A longer interval blurs the loop's age, a shorter one wakes idle actors.
TICK_INTERVAL_S: Final = 0.25
# The most that a tick adds to a stall. More would count time in which this process was stopped;
# less counts too little if the loop is often late.
_MOST_PER_TICK_S: Final = 1.0


class Beat(NamedTuple):
    """The answer to a ping: the actor's incarnation, seconds since its loop last ticked, and
    `LoopTicker.stalled_s`."""

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
