"""The processes of the weights benchmark: `python tests/bench/weights_roles.py ROLE ...`.

`engine` holds parameters and serves the steps of a sync; `rank` publishes and copies. Both talk to
the supervisor part, which runs in the benchmark's own process, over the real RPC.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import uvloop
import zmq
from bench_namespace import loopback_nbytes
from qwen3_shapes import SHAPES, parameter_shapes
from torch import Tensor

from umbra.runtime.cluster.socket_dir import FD_SOCKET
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.loop_thread import LoopThread
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.weights.sync_calls import (
    SyncAbort,
    SyncBegin,
    SyncCall,
    SyncEnd,
    SyncFilled,
    SyncGrant,
    SyncProgressed,
    SyncReport,
)
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import probe_import
from umbra.runtime.weights.transports.shared_memory.destinations import populate
from umbra.runtime.weights.weight_publisher import WeightPublisher
from umbra.runtime.weights.weight_receiver import WeightReceiver

_TIMEOUT_S: Final = 60.0
_SYNCS_A_ROUND: Final = 4


def ref(name: str, folder: Path) -> ActorRef:
    return ActorRef(name=name, incarnation=1, node_id="here", ipc_endpoint=f"ipc://{folder}/{name}")


def model_tensors(total_nbytes: int, device: str = "cpu") -> dict[str, Tensor]:
    """Tensors of a decoder's shapes, bfloat16 with float32 norms, about `total_nbytes` in all."""
    hidden = 1024
    layer_nbytes = 2 * (4 * hidden * hidden + 3 * hidden * 3 * hidden) + 2 * 4 * hidden
    num_layers = max(1, int(total_nbytes * 0.8) // layer_nbytes)
    num_tokens = max(1, (total_nbytes - num_layers * layer_nbytes) // (2 * hidden))
    shapes: dict[str, tuple[int, ...]] = {"embed": (num_tokens, hidden)}
    for idx in range(num_layers):
        shapes |= {f"layers.{idx}.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        shapes |= {f"layers.{idx}.{name}": (3 * hidden, hidden) for name in ("gate", "up", "down")}
        shapes |= {f"layers.{idx}.norm_{place}": (hidden,) for place in ("in", "post")}
    return {
        name: torch.full(
            shape,
            float(len(name)),
            dtype=torch.float32 if len(shape) == 1 else torch.bfloat16,
            device=device,
        )
        for name, shape in shapes.items()
    }


def qwen3_tensors(shape: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors with the names and shapes of a Qwen3, on the GPU."""
    return {
        name: torch.full(sizes, len(name) / 64, dtype=dtype, device="cuda")
        for name, sizes in parameter_shapes(SHAPES[shape]).items()
    }


class BenchEngine:
    """An engine without a model: parameters in memory, the steps of a sync in one thread."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        parameters = {name: torch.empty_like(t) for name, t in tensors.items()}
        populate(parameters.values())
        self._thread = ThreadPoolExecutor(1)
        self._receiver = WeightReceiver(parameters)

    async def probe_import(self, allocations: list[list[Any]]) -> str:
        problem: str = await self._run(probe_import, allocations)
        return problem

    async def prepare_update(self, version: int, manifest: bytes, buckets: dict[str, Any]) -> None:
        await self._run(self._receiver.begin, manifest, buckets)

    async def load(self) -> dict[str, int]:
        return {"nbytes": await self._run(self._receiver.load)}

    async def verify_update(self, regions: list[list[int | None]]) -> list[str]:
        mismatches: list[str] = await self._run(self._receiver.verify, regions)
        return mismatches

    async def commit_update(self) -> None:
        await self._run(self._receiver.end)

    async def abort_update(self) -> None:
        await self._run(self._receiver.abort)

    async def _run(self, work: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


async def serve(target: object, name: str, folder: Path) -> None:
    """Serves until cancelled; prints "ready" on standard output."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = ActorServer(target, 1)
    server.bind(context.socket(zmq.ROUTER), ref(name, folder).ipc_endpoint)
    print("ready", flush=True)
    await server.run()


class RemoteSupervisor:
    """`SyncSupervisor` over RPC, blocking, as a rank's session does it.

    Args:
        folder: of the sockets of its node.
    """

    def __init__(self, loop: LoopThread, handle: Handle, folder: Path) -> None:
        self.fd_socket = str(folder / FD_SOCKET)
        self._loop = loop
        self._handle = handle

    node_id = "here"

    def check(self) -> None:
        pass

    def sync_begin(self, call: SyncBegin) -> SyncGrant:
        return SyncGrant.from_wire(self._call("sync_begin", call))

    def sync_progress(self, call: SyncProgressed) -> dict[str, Any]:
        answer: dict[str, Any] = self._call("sync_progress", call)
        return answer

    def sync_filled(self, call: SyncFilled) -> None:
        self._call("sync_filled", call)

    def sync_end(self, call: SyncEnd) -> SyncReport:
        return SyncReport.from_wire(self._call("sync_end", call))

    def sync_abort(self, call: SyncAbort) -> None:
        self._call("sync_abort", call)

    def _call(self, method: str, call: SyncCall) -> Any:
        return self._loop.run(self._handle.call(method, call.to_wire(), timeout_s=_TIMEOUT_S))


def run_rank(folder: Path, total_nbytes: int) -> dict[str, Any]:
    """One round: a first sync, then syncs and plain copies in turn, then one with checksums."""
    tensors = model_tensors(total_nbytes)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}

    with _supervisor(folder) as supervisor:
        publisher = WeightPublisher(supervisor, 0, 1, tensors)
        versions = itertools.count(1)

        def sync(pool: str) -> float:
            begun_at = time.perf_counter()
            publisher.publish(pool, next(versions), _TIMEOUT_S)
            return time.perf_counter() - begun_at

        first_s = sync("plain")
        later_s: list[float] = []
        copy_s: list[float] = []
        for _ in range(_SYNCS_A_ROUND):
            begun_at = time.perf_counter()
            for name, tensor in tensors.items():
                copies[name].copy_(tensor)
            copy_s.append(time.perf_counter() - begun_at)
            later_s.append(sync("plain"))
        verified_s = min(sync("verified") for _ in range(2))
    return {
        "nbytes": publisher.manifest.payload_nbytes,
        "first_s": first_s,
        "later_s": statistics.median(later_s),
        "verified_s": verified_s,
        "copy_s": statistics.median(copy_s),
    }


def run_far_rank(folder: Path, total_nbytes: int, device: str, changed: float) -> dict[str, float]:
    """One round whose engines are on another node: a first sync of each pool, then those that
    count.

    Args:
        changed: share of the bfloat16 values that changes before each version. If it is 0, there is
            no pool that gets only these.
    """
    tensors = model_tensors(total_nbytes, device)
    versions = itertools.count(1)
    measured: dict[str, list[tuple[float, float, float]]] = {}
    with _supervisor(folder) as supervisor:
        publishers = {
            pool: WeightPublisher(supervisor, 0, 1, tensors, link_host="127.0.0.1")
            for pool in ("plain", *(["delta"] if changed else []))
        }
        for _ in range(1 + _SYNCS_A_ROUND):
            _change(tensors, changed)
            for pool, publisher in publishers.items():
                nbytes, cpu_s, began = loopback_nbytes(), time.process_time(), time.perf_counter()
                publisher.publish(pool, next(versions), _TIMEOUT_S)
                took = time.perf_counter() - began, time.process_time() - cpu_s
                row = (*took, (loopback_nbytes() - nbytes) / 1e6)
                measured.setdefault(pool, []).append(row)
    facts = {"weights_mb": publishers["plain"].manifest.payload_nbytes / 1e6}
    for pool, rows in measured.items():
        prefix = "" if pool == "plain" else f"{pool}_"
        columns = zip(
            ("sync_s", "rank_cpu_s", "network_mb"), zip(*rows[1:], strict=True), strict=True
        )
        facts |= {f"{prefix}{name}": statistics.median(column) for name, column in columns}
    return facts


def _change(tensors: Mapping[str, Tensor], share: float) -> None:
    for tensor in tensors.values():
        if tensor.dtype == torch.bfloat16 and share:
            num = round(share * tensor.numel())
            places = torch.randint(tensor.numel(), (num,), device=tensor.device)
            tensor.view(-1).view(torch.int16)[places] ^= 1


def run_gpu_rank(
    folder: Path, shape: str, dtype: torch.dtype, pools: Sequence[str]
) -> dict[str, Any]:
    """One round on a GPU: each pool has a first sync, then all in turn."""
    tensors = qwen3_tensors(shape, dtype)
    copies = {name: torch.empty_like(t, dtype=torch.bfloat16) for name, t in tensors.items()}
    seconds: dict[str, list[float]] = {name: [] for name in [*pools, "plain_copy"]}
    reports: list[SyncReport] = []
    versions = itertools.count(1)
    with _supervisor(folder) as supervisor:
        publisher = WeightPublisher(supervisor, 0, 1, tensors, torch.bfloat16)
        for _ in range(1 + _SYNCS_A_ROUND):
            for pool in pools:
                begun_at = time.perf_counter()
                report = publisher.publish(pool, next(versions), _TIMEOUT_S)
                seconds[pool].append(time.perf_counter() - begun_at)
                if pool == "cuda_ipc":
                    reports.append(report)
            begun_at = time.perf_counter()
            for name, tensor in tensors.items():
                copies[name].copy_(tensor)
            torch.cuda.synchronize()
            seconds["plain_copy"].append(time.perf_counter() - begun_at)
    medians = {f"{name}_s": statistics.median(taken[1:]) for name, taken in seconds.items()}
    facts = {
        "nbytes": publisher.manifest.payload_nbytes,
        "cuda_ipc_first_s": seconds["cuda_ipc"][0],
    }
    return facts | medians | _medians_of(reports[1:])


def _medians_of(reports: Sequence[SyncReport]) -> dict[str, float]:
    rows = [
        {
            "prepare_s": report.prepare_s,
            "transfer_s": report.transfer_s,
            "load_s": report.engines["engine"]["load_s"],
            "verify_s": report.verify_s,
            "commit_s": report.resume_s,  # nothing is resumed
            "paused_to_committed_s": report.transfer_s + report.verify_s + report.resume_s,
        }
        for report in reports
    ]
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


@contextmanager
def _supervisor(folder: Path) -> Generator[RemoteSupervisor]:
    async def connect() -> tuple[Client, Handle]:
        client = Client("here")
        return client, client.handle(ref("supervisor", folder))

    async def disconnect(client: Client) -> None:
        client.close()

    with LoopThread("rpc") as loop:
        client, handle = loop.run(connect())
        try:
            yield RemoteSupervisor(loop, handle, folder)
        finally:
            loop.run(disconnect(client))


def main() -> None:
    """Arguments: role, folder, then the bytes of the tensors; or with a GPU their shape, the rank's
    dtype and the names of the pools, or on two nodes the rank's and the engines' device and the
    share that changes. At last an engine's name."""
    role, folder, arguments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    match role, arguments:
        case "engine", [total_nbytes, name]:
            _run_engine(model_tensors(int(total_nbytes)), folder, name)
        case "far_engine", [total_nbytes, _, device, _, name]:
            _run_engine(model_tensors(int(total_nbytes), device), folder, name)
        case "gpu_engine", [shape, *_, name]:
            _run_engine(qwen3_tensors(shape, torch.bfloat16), folder, name)
        case "far_rank", [total_nbytes, device, _, changed]:
            facts = run_far_rank(folder, int(total_nbytes), device, float(changed))
            print(json.dumps(facts), flush=True)
        case "rank", [total_nbytes]:
            print(json.dumps(run_rank(folder, int(total_nbytes))), flush=True)
        case "gpu_rank", [shape, dtype, *pools]:
            facts = run_gpu_rank(folder, shape, getattr(torch, dtype), pools)
            print(json.dumps(facts), flush=True)
        case _:
            sys.exit(f"not a role: {sys.argv[1:]}")


def _run_engine(tensors: Mapping[str, Tensor], folder: Path, name: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(BenchEngine(tensors), name, folder))


if __name__ == "__main__":
    main()
