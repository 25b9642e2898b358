"""An echo over pyzmq's asyncio sockets with msgpack on uvloop: what RPC adds cost to.

It has no call ids, deadlines, errors or cancellation: the answers come in the order of the calls.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import msgpack
import uvloop
import zmq
import zmq.asyncio
from call_timing import PAYLOAD, Batch, measure_latency, measure_throughput
from system_report import Task, run_program

_FIRST_ANSWER_TIMEOUT_S = 20.0


def _open_socket(kind: int) -> zmq.asyncio.Socket:
    socket = zmq.asyncio.Context.instance().socket(kind)
    # At its high-water mark, 1000 by default, a ROUTER drops messages without a word.
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.linger = 0
    return socket


async def _echo(endpoint: str) -> None:
    socket = _open_socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        identity, message = await socket.recv_multipart()
        answer = [identity, msgpack.packb(msgpack.unpackb(message))]
        await socket.send_multipart(answer)  # pyright: ignore[reportUnknownMemberType]


class _Caller:
    def __init__(self, endpoint: str) -> None:
        self._socket = _open_socket(zmq.DEALER)
        self._socket.connect(endpoint)

    async def call(self) -> Any:
        await self._socket.send(msgpack.packb(PAYLOAD))
        return msgpack.unpackb(await self._socket.recv())

    def pipelined(self, width: int) -> Batch:
        async def batch(num_calls: int) -> int:
            num_waves = -(-num_calls // width)
            for _ in range(num_waves):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._send(width))
                    for _ in range(width):
                        msgpack.unpackb(await self._socket.recv())
            return num_waves * width

        return batch

    async def _send(self, num_calls: int) -> None:
        for _ in range(num_calls):
            await self._socket.send(msgpack.packb(PAYLOAD))

    def close(self) -> None:
        self._socket.close()
        zmq.asyncio.Context.instance().term()


async def measure(task: Task) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        endpoint = f"ipc://{folder}/echo"
        start = time.perf_counter()
        argv = [sys.executable, __file__, endpoint]
        with subprocess.Popen(argv) as server:  # noqa: ASYNC220 -- nothing else is on the loop
            caller = _Caller(endpoint)
            try:
                async with asyncio.timeout(_FIRST_ANSWER_TIMEOUT_S):
                    await caller.call()
                facts: dict[str, Any] = {
                    "version": zmq.__version__,
                    "first_call_s": round(time.perf_counter() - start, 4),
                    "first_call_from_exec_s": task.since_spawn_s(),
                }
                if task.duration_s:
                    candidates = {f"{w} in flight": caller.pipelined(w) for w in (100, 1000)}
                    facts |= await measure_latency(caller.call, task.duration_s)
                    facts |= await measure_throughput(candidates, task.duration_s)
            finally:
                caller.close()
                server.kill()
    return facts


if __name__ == "__main__":
    if len(sys.argv) == 2:
        uvloop.run(_echo(sys.argv[1]))
        os._exit(0)
    run_program(measure, loop_factory=uvloop.new_event_loop)
