"""Tells hung from busy.

A thread of each actor answers pings on a socket of its own and reports how long ago the
actor's event loop last ticked. So three cases can be told apart from outside: no answer (the
process is stopped or wedged in C code that holds the interpreter), an answer with an old tick
(the loop is blocked: busy, or hung once `busy_limit_s` is passed) and all well. An actor that
works on something else than its loop (an engine) also says whether it gets on with it.
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

# The loop notes that it lives this often. Longer blurs the age, shorter wakes idle actors.
TICK_INTERVAL_S: Final = 0.25
# The most that a tick adds to a stall. More would blame what was stopped together with this process
# for all of the time; less counts too little where the loop is often late.
_MOST_PER_TICK_S: Final = 1.0


class Beat(NamedTuple):
    """The answer to a ping.

    Attributes:
        incarnation: of the actor.
        loop_age_s: since its loop last ticked.
        stalled_s: see `LoopTicker`.
    """

    incarnation: int
    loop_age_s: float
    stalled_s: float

    def encode(self) -> bytes:
        data: bytes = msgpack.packb(self)
        return data

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Beat:
        """Raises ProtocolError where it is malformed."""
        try:
            fields: Any = msgpack.unpackb(data)
        except Exception as error:  # what is no msgpack fails in many ways
            raise ProtocolError(f"undecodable heartbeat: {type(error).__name__}") from error
        match fields:
            case [int() as incarnation, float() as loop_age_s, float() as stalled_s]:
                return cls(incarnation, loop_age_s, stalled_s)
            case _:
                raise ProtocolError("a heartbeat must be [incarnation, loop_age_s, stalled_s]")


class LoopTicker:
    """Notes the time whenever the loop gets a turn. Owned by the actor host.

    Args:
        progress: None while the actor has nothing to do; else what changes as it gets on.

    Attributes:
        stalled_s: for how long there has been something to do and no change.
    """

    def __init__(self, progress: Callable[[], object] | None = None) -> None:
        self.last_tick = time.monotonic()
        self.stalled_s = 0.0
        self._progress = progress

    async def run(self) -> None:
        """Ticks until cancelled."""
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
    """The answering thread. A context manager; leaving it ends the thread and its socket."""

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
