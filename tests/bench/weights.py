"""How fast weights reach an engine, beside a plain copy of the same tensors.

What is counted: `first_s` and `later_s` are the wall time of `WeightPublisher.publish` in a rank
process with one thread: all calls to the supervisor, preparing the engine, filling the memfd
buckets, loading them into the parameters of an engine process, verification, commit. The first sync
makes, clears and maps the buckets and compares checksums of every byte; later ones (every 16th
excepted) compare counts and bytes. `verified_gb_per_s` is for a sync that compares checksums. The
plain copy is `Tensor.copy_` of each tensor within the rank process, one thread, memory present.
Not counted: starting processes, and the page faults of the engine's parameters, which an engine
takes when it allocates them (`populate`), as the plain copy's destination has had them.

Supervisor part (this process), rank and engine are new in every round; in a round, syncs and
copies alternate. All numbers are medians over the rounds.

With `--device cuda`, the tensors are those of a Qwen3 on one GPU, from `--dtype` to bfloat16. Each
number is then the seconds of a rank's `publish` through one transport, and `..._verified_s` with
checksums; in a round, the transports alternate. Of an 8B model only CUDA IPC without checksums is
measured: the rest would take minutes. The plain copy is the same cast within the rank. Beside them,
`verl_protocol.py` measures tensors that are in bfloat16 already: `verl_s` is verl's protocol with
its own size of bucket, `copy_s` one copy of as many bytes.

`cuda_ipc_first_s` is the first sync. `paused_to_committed_s` is the part of a later one from all
engines paused and awake to the committed version, by the supervisor's clock. It consists of
`prepare_s` (the engine gets the description), `transfer_s` (`load_s` is the engine's part of it),
`verify_s` and `commit_s`. `--engine vllm` takes a vLLM with dummy weights and without CUDA graphs
in place of an engine that is only parameters. It is paused all the time, so that no phase has its
pauses.

With `--engines-elsewhere N`, the rank is on one node and N engines are on another: weights travel
by links, over the loopback of a network namespace of its own. Of a round's syncs, all but
the first, `sync_s` is the median, and `rank_cpu_s` the median of the rank's processor time;
`network_mb` are all bytes through the loopback in one of them, with the headers of IP and tcp.
Needs `unshare`, and root or user namespaces. With `--device cuda`, too, the rank's tensors
are on the first GPU and the engines' on the second, so that NCCL connects them. It may take other
ways than the loopback, unless NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 are set.

    python tests/bench/weights.py [--rounds 5] [--megabytes 1024] [--device cpu] [--json]
    python tests/bench/weights.py --engines-elsewhere 4 --megabytes 256
    python tests/bench/weights.py --device cuda [--shape 0.6B] [--dtype float32] [--engine vllm]
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import uvloop
import zmq
from bench_hardware import describe_hardware
from bench_namespace import IN_NAMESPACE, run_in_namespace
from bench_options import options_parser, positive
from bench_programs import BenchError
from result_table import print_result

from umbra.runtime.cli.umbra_command import umbra_version
from umbra.runtime.engine_api.lifecycle import (
    AbortUpdate,
    BeginUpdate,
    CommitUpdate,
    EngineLifecycle,
    EngineStarted,
    EngineState,
    Pause,
    Resume,
    Tag,
)
from umbra.runtime.pools.job_rings import JobRings
from umbra.runtime.process.descendants import kill_tree
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.rpc_server import ActorServer
from umbra.runtime.weights.sync_calls import (
    SyncAbort,
    SyncBegin,
    SyncEnd,
    SyncFilled,
    SyncProgressed,
)
from umbra.runtime.weights.sync_coordinator import SyncCoordinator, SyncSettings
from umbra.runtime.weights.transports.shared_memory.memfd import serve_fds
from umbra.runtime.weights.transports.shared_memory.node_rings import NodeRings

_ROUND_TIMEOUT_S: Final = 300.0
_NEVER: Final = 1 << 30
_ROLES: Final = Path(__file__).with_name("weights_roles.py")


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument(
        "--megabytes", type=positive, default=1024, help="of weights on the cpu (default 1024)"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda compares the ways from one GPU's trainer to its engine (default cpu)",
    )
    parser.add_argument(
        "--shape",
        choices=["0.6B", "8B"],
        default="0.6B",
        help="of the model on a GPU (default 0.6B)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the rank's tensors on a GPU (default float32)",
    )
    parser.add_argument(
        "--engine",
        choices=["parameters", "vllm"],
        default="parameters",
        help="on a GPU (default parameters, without a model around them)",
    )
    parser.add_argument(
        "--engines-elsewhere",
        type=int,
        default=0,
        help="number of engines on another node (default 0: one engine on the same node)",
    )
    given = parser.parse_args()
    if given.engines_elsewhere and IN_NAMESPACE not in os.environ:
        return run_in_namespace()
    if given.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: this machine has no usable CUDA device")
    result: dict[str, Any] = {
        "bench": "weights",
        "hardware": describe_hardware(),
        "versions": {"torch": version("torch"), "umbra": umbra_version()},
        "rounds": given.rounds,
    }
    if given.device == "cuda" and not given.engines_elsewhere:
        result |= {"shape": given.shape, "dtype": given.dtype, "engine": given.engine}
        if given.engine == "vllm":
            result["versions"]["vllm"] = version("vllm")
        result["umbra"] = _run_on_gpu(given.rounds, given.shape, given.dtype, given.engine)
    elif given.engines_elsewhere:
        result["engines"] = given.engines_elsewhere
        result["umbra"] = _run_elsewhere(
            given.rounds, given.megabytes * 10**6, given.engines_elsewhere, given.device
        )
    else:
        result |= _run(given.rounds, given.megabytes * 10**6)
    return print_result(result, as_json=given.json)


def _run(rounds: int, total_nbytes: int) -> dict[str, Any]:
    pools = {"plain": SyncSettings(), "verified": SyncSettings(verify_every=1)}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = [runner.run(_round([str(total_nbytes)], pools)) for _ in range(rounds)]
    median = _medians(rows)
    gigabytes = median["nbytes"] / 1e9
    umbra = {
        "gb_per_s": round(gigabytes / median["later_s"], 3),
        "verified_gb_per_s": round(gigabytes / median["verified_s"], 3),
        "first_s": round(median["first_s"], 4),
        "later_s": round(median["later_s"], 4),
    }
    return {
        "umbra": umbra,
        "plain_copy": {"gb_per_s": round(gigabytes / median["copy_s"], 3)},
        "ratio": round(median["copy_s"] / median["later_s"], 3),
        "first_to_later": round(median["first_s"] / median["later_s"], 3),
        "nbytes": int(median["nbytes"]),
    }


def _run_elsewhere(
    rounds: int, total_nbytes: int, num_engines: int, device: str
) -> dict[str, float]:
    pools = {"plain": SyncSettings(verify_every=_NEVER)}
    names = [f"engine{idx}" for idx in range(num_engines)]
    devices = ["cpu", "cpu"] if device == "cpu" else ["cuda:0", "cuda:1"]
    arguments = [str(total_nbytes), *devices]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = [runner.run(_round(arguments, pools, "far_", names)) for _ in range(rounds)]
    return {key: round(value, 4) for key, value in _medians(rows).items()}


def _run_on_gpu(rounds: int, shape: str, dtype: str, engine: str) -> dict[str, Any]:
    pools = {"cuda_ipc": SyncSettings(transport="cuda_ipc", verify_every=_NEVER)}
    if (shape, engine) == ("0.6B", "parameters"):
        pools = {
            f"{transport}{suffix}": SyncSettings(transport=transport, verify_every=every)
            for suffix, every in {"": _NEVER, "_verified": 1}.items()
            for transport in ("memfd", "cuda_ipc")
        }
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = [_gpu_round(runner, pools, [shape, dtype, engine]) for _ in range(rounds)]
    median = _medians(rows)
    umbra: dict[str, Any] = {key: round(value, 5) for key, value in median.items()}
    umbra["nbytes"] = int(median["nbytes"])
    umbra["verl_to_cuda_ipc"] = round(median["verl_s"] / median["cuda_ipc_s"], 2)
    return umbra


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _gpu_round(
    runner: asyncio.Runner, pools: Mapping[str, SyncSettings], arguments: Sequence[str]
) -> dict[str, float]:
    from verl_protocol import DEFAULT_BUCKET_MIB, measure

    row = runner.run(_round([*arguments, *pools], pools, "gpu_"))
    beside = measure(arguments[0], DEFAULT_BUCKET_MIB, "cuda")
    return row | {"verl_s": beside["verl_s"], "copy_s": beside["copy_s"]}


async def _round(
    arguments: Sequence[str],
    pools: Mapping[str, SyncSettings],
    prefix: str = "",
    names: Sequence[str] = ("engine",),
) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        async with (
            asyncio.timeout(_ROUND_TIMEOUT_S),
            AsyncExitStack() as stack,
            _supervisor(folder, pools, names, "there" if prefix == "far_" else "here"),
        ):
            for name in names:
                role = _process(f"{prefix}engine", folder, [*arguments, name])
                engine = await stack.enter_async_context(role)
                assert engine.stdout is not None
                while await engine.stdout.readline() not in (b"ready\n", b""):
                    pass  # a library's own output
            async with _process(f"{prefix}rank", folder, arguments) as rank:
                output, _ = await rank.communicate()
                if rank.returncode:
                    raise BenchError(f"{prefix}rank: status {rank.returncode}; its error is above")
    facts: dict[str, float] = json.loads(output)
    return facts


@asynccontextmanager
async def _process(
    role: str, folder: Path, arguments: Sequence[str]
) -> AsyncGenerator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(_ROLES), role, str(folder), *arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            kill_tree(process.pid)  # an engine of a library has processes of its own
        await process.wait()


@asynccontextmanager
async def _supervisor(
    folder: Path, pools: Mapping[str, SyncSettings], names: Sequence[str], node_id: str
) -> AsyncGenerator[None]:
    """Serves syncs at `folder`/supervisor while the block runs.

    Args:
        names: of the engines.
        node_id: of their node.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket_path = str(folder / "fds")
    async with (
        Client("here") as client,
        serve_fds(socket_path) as fds,
        asyncio.TaskGroup() as tasks,
    ):
        engines = [_Engine(name, node_id, client.handle(_ref(name, folder))) for name in names]
        rings = JobRings(NodeRings(fds), node_id, _no_other_node, lambda: 1)
        coordinators = {
            name: SyncCoordinator(name, lambda: engines, fds, rings, settings)
            for name, settings in pools.items()
        }
        server = ActorServer(_Supervisor(coordinators), 1)
        server.bind(context.socket(zmq.ROUTER), _ref("supervisor", folder).ipc_endpoint)
        running = [tasks.create_task(server.run())]
        running += [tasks.create_task(c.run()) for c in coordinators.values()]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
    context.term()


def _ref(name: str, folder: Path) -> ActorRef:
    return ActorRef(name=name, incarnation=1, node_id="here", ipc_endpoint=f"ipc://{folder}/{name}")


def _no_other_node(node_id: str) -> Handle:
    raise BenchError(f"there is no node {node_id!r}")


class _Supervisor:
    """The sync calls of the supervisor, by pool."""

    def __init__(self, coordinators: Mapping[str, SyncCoordinator]) -> None:
        self._coordinators = coordinators

    async def sync_begin(self, call: dict[str, Any]) -> dict[str, Any]:
        begin = SyncBegin.from_wire(call)
        return (await self._coordinators[begin.pool].sync_begin(begin)).to_wire()

    def sync_progress(self, call: dict[str, Any]) -> dict[str, Any]:
        progress = SyncProgressed.from_wire(call)
        return self._coordinators[progress.pool].sync_progress(progress)

    async def sync_filled(self, call: dict[str, Any]) -> None:
        filled = SyncFilled.from_wire(call)
        await self._coordinators[filled.pool].sync_filled(filled)

    async def sync_end(self, call: dict[str, Any]) -> dict[str, Any]:
        end = SyncEnd.from_wire(call)
        return (await self._coordinators[end.pool].sync_end(end)).to_wire()

    def sync_abort(self, call: dict[str, Any]) -> None:
        abort = SyncAbort.from_wire(call)
        self._coordinators[abort.pool].sync_abort(abort)


class _Engine:
    """An engine process as the coordinators see it. It never generates, so pausing is free."""

    incarnation = 1

    def __init__(self, name: str, node_id: str, handle: Handle) -> None:
        self.name = name
        self.node_id = node_id
        self._handle = handle
        self.lifecycle = EngineLifecycle().apply(EngineStarted())

    async def probe_import(self, allocations: list[list[Any]], timeout_s: float) -> str:
        return str(await self._handle.call("probe_import", allocations, timeout_s=timeout_s))

    async def pause(self, mode: str, timeout_s: float) -> None:
        if self.lifecycle.state == EngineState.SERVING:
            self.lifecycle = self.lifecycle.apply(Pause())

    async def wake(self, tags: Sequence[Tag], timeout_s: float) -> None:
        pass

    async def resume(self, timeout_s: float) -> None:
        self.lifecycle = self.lifecycle.apply(Resume())

    async def begin_update(
        self, version: int, manifest: bytes, buckets: dict[str, Any], timeout_s: float
    ) -> None:
        arguments = (version, manifest, buckets)
        await self._handle.call("begin_update", *arguments, timeout_s=timeout_s)

    def touch(self, version: int) -> None:
        self.lifecycle = self.lifecycle.apply(BeginUpdate(version))

    async def load(self, timeout_s: float) -> dict[str, Any]:
        loaded: dict[str, Any] = await self._handle.call("load", timeout_s=timeout_s)
        return loaded

    async def finish_update(
        self, regions: list[list[int | None]], timeout_s: float
    ) -> dict[str, Any]:
        found: dict[str, Any] = await self._handle.call(
            "finish_update", regions, timeout_s=timeout_s
        )
        return found

    async def commit_update(self, version: int, timeout_s: float) -> None:
        await self._handle.call("commit_update", timeout_s=timeout_s)
        self.lifecycle = self.lifecycle.apply(CommitUpdate(version))

    async def abort_update(self, timeout_s: float) -> None:
        await self._handle.call("abort_update", timeout_s=timeout_s)
        if self.lifecycle.state == EngineState.UPDATING:
            self.lifecycle = self.lifecycle.apply(AbortUpdate())

    def kill(self, reason: str) -> None:
        raise RuntimeError(f"the engine failed: {reason}")


if __name__ == "__main__":
    sys.exit(main())
