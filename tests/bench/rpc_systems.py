"""One system of the rpc benchmark: `rpc_systems.py NAME STARTED_AT DURATION_S`.

Prints its facts as one line of JSON. STARTED_AT is `time.monotonic()` at the interpreter's start.
DURATION_S is of each measurement of calls; 0 measures the start only. Modules that a system does
not need are not imported, so that none is charged to another system.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

Call = Callable[[], Awaitable[object]]
Batch = Callable[[], Awaitable[int]]
"""Makes many calls and returns their number."""

PAYLOAD: Final = b"x" * 100
TIMEOUT_S: Final = 20.0
NUM_WARM_UP_CALLS: Final = 200
MIN_CALLS: Final = 100


class Echo:
    """The actor that umbra and Ray start."""

    def echo(self, value: bytes) -> bytes:
        return value

    async def echo_async(self, value: bytes) -> bytes:
        return value


async def measure_calls(call: Call, batches: dict[str, Batch], duration_s: float) -> dict[str, Any]:
    """Latency of sequential calls, and the throughput of the fastest of `batches`."""
    for _ in range(NUM_WARM_UP_CALLS):
        await call()
    taken_s: list[float] = []
    deadline = time.perf_counter() + duration_s
    while len(taken_s) < MIN_CALLS or time.perf_counter() < deadline:
        before = time.perf_counter()
        await call()
        taken_s.append(time.perf_counter() - before)
    taken_s.sort()
    rates = {await rate(batch, duration_s): name for name, batch in batches.items()}
    return {
        "p50_us": round(taken_s[len(taken_s) // 2] * 1e6, 1),
        "p99_us": round(taken_s[len(taken_s) * 99 // 100] * 1e6, 1),
        "calls_per_s": round(max(rates)),
        "idiom": rates[max(rates)],
    }


async def rate(batch: Batch, duration_s: float) -> float:
    num_calls, began = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < duration_s:
        num_calls += await batch()
    return num_calls / elapsed_s


def ways_of(call: Call, *widths: int) -> dict[str, Batch]:
    """Ways of having `width` calls in flight: as many tasks, which make one call or 20 each."""

    def of(width: int, num_each: int) -> Batch:
        async def work() -> None:
            for _ in range(num_each):
                await call()

        async def batch() -> int:
            await asyncio.gather(*[work() for _ in range(width)])
            return width * num_each

        return batch

    return {f"{width} tasks of {num}": of(width, num) for width in widths for num in (1, 20)}


def first_call(exec_at: float, began: float) -> dict[str, float]:
    now = time.monotonic()
    return {
        "first_call_s": round(now - began, 4),
        "first_call_from_exec_s": round(now - exec_at, 4),
    }


async def measure_umbra(exec_at: float, duration_s: float) -> dict[str, Any]:
    """Calls go straight to the actor, over a socket of this process."""
    from umbra.runtime.actor.actor_spec import ActorSpec
    from umbra.runtime.cli.command_parsers import umbra_version
    from umbra.runtime.rpc.rpc_client import Client
    from umbra.runtime.session.launch import SessionConfig
    from umbra.runtime.session.session import Session

    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as run_dir:
        began = time.monotonic()
        with Session.from_torchrun(SessionConfig(run_dir=Path(run_dir))) as session:
            ready_s = round(time.monotonic() - began, 4)
            spec = ActorSpec(name="echo", target="rpc_systems:Echo", sys_path=(str(folder),))
            actor = session.spawn(spec)
            actor.call("echo", PAYLOAD, timeout_s=TIMEOUT_S)
            facts = {"version": umbra_version(), "ready_s": ready_s}
            facts |= first_call(exec_at, began)
            if duration_s:
                async with Client(actor.ref.node_id) as client:
                    handle = client.handle(actor.ref)

                    async def call() -> Any:
                        return await handle.call("echo", PAYLOAD, timeout_s=TIMEOUT_S)

                    facts |= await measure_calls(call, ways_of(call, 256, 1000), duration_s)
    return facts


async def measure_bare_zmq(exec_at: float, duration_s: float) -> dict[str, Any]:
    """pyzmq's asyncio sockets with msgpack: no call ids, deadlines, errors or cancellation. Answers
    come in the order of the calls."""
    import msgpack
    import zmq

    async def call() -> Any:
        await socket.send(msgpack.packb(PAYLOAD))
        return msgpack.unpackb(await socket.recv())

    async def send_1000() -> None:
        for _ in range(1000):
            await socket.send(msgpack.packb(PAYLOAD))

    async def call_1000() -> int:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_1000())
            for _ in range(1000):
                msgpack.unpackb(await socket.recv())
        return 1000

    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        endpoint = f"ipc://{folder}/echo"
        began = time.monotonic()
        with subprocess.Popen([sys.executable, __file__, endpoint]) as server:  # noqa: ASYNC220
            socket = open_socket(zmq.DEALER)
            socket.connect(endpoint)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await call()
                facts: dict[str, Any] = {"version": zmq.__version__, **first_call(exec_at, began)}
                if duration_s:
                    facts |= await measure_calls(call, {"1000 in flight": call_1000}, duration_s)
            finally:
                socket.close()
                server.kill()
    return facts


def open_socket(kind: int) -> Any:
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(kind)
    # At its high-water mark, 1000 by default, a ROUTER drops messages without a word.
    socket.sndhwm = socket.rcvhwm = socket.linger = 0
    return socket


async def serve_bare_zmq(endpoint: str) -> None:
    import msgpack
    import zmq

    socket = open_socket(zmq.ROUTER)
    socket.bind(endpoint)
    while True:
        identity, message = await socket.recv_multipart()
        await socket.send_multipart([identity, msgpack.packb(msgpack.unpackb(message))])


async def measure_ray(exec_at: float, duration_s: float) -> dict[str, Any]:
    """An actor of a local cluster without dashboard; on an event loop, as `Echo` has an async
    method."""
    began = time.monotonic()
    import ray as ray_module  # pyright: ignore[reportMissingImports]

    ray: Any = ray_module
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ready_s = round(time.monotonic() - began, 4)
    try:
        actor = ray.remote(Echo).remote()

        async def call() -> Any:
            # Ray's own blocking wait: awaiting the reference adds a thread hop.
            return ray.get(actor.echo.remote(PAYLOAD), timeout=TIMEOUT_S)

        async def call_asyncio() -> Any:
            return await actor.echo.remote(PAYLOAD)

        async def get_1000() -> int:
            ray.get([actor.echo.remote(PAYLOAD) for _ in range(1000)], timeout=TIMEOUT_S)
            return 1000

        await call()
        facts = {"version": ray.__version__, "ready_s": ready_s}
        facts |= first_call(exec_at, began)
        if duration_s:
            ways = ways_of(call_asyncio, 500) | {"ray.get of 1000": get_1000}
            facts |= await measure_calls(call, ways, duration_s)
    finally:
        ray.shutdown()
    return facts


def main() -> None:
    name, *rest = sys.argv[1:]
    if name == "ray":
        runner = asyncio.Runner()
    else:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    measures = {"umbra": measure_umbra, "bare_zmq": measure_bare_zmq, "ray": measure_ray}
    with runner:
        if not rest:
            runner.run(serve_bare_zmq(name))
        print(json.dumps(runner.run(measures[name](*map(float, rest)))), flush=True)


if __name__ == "__main__":
    main()
