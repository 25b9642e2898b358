"""Tells hung from busy.

A thread of each actor answers pings on a socket of its own and reports how long ago the
actor's event loop last ticked. So three cases can be told apart from outside: no answer (the
process is stopped or wedged in C code that holds the interpreter), an answer with an old tick
(the loop is blocked: busy, or hung once `busy_limit_s` is passed) and all well.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final

import msgpack
import zmq

# The loop notes that it lives this often. Longer blurs the age, shorter wakes idle actors.
TICK_INTERVAL_S: Final = 0.25


class LoopTicker:
    """Notes the time whenever the loop gets a turn. Owned by the actor host."""

    def __init__(self) -> None:
        self.last_tick = time.monotonic()

    async def run(self) -> None:
        """Ticks until cancelled."""
        while True:
            self.last_tick = time.monotonic()
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
                beat = msgpack.packb((self._incarnation, age_s))
                self._socket.send_multipart([frames[0], beat])
        finally:
            stop.close(linger=0)
            self._socket.close(linger=0)
