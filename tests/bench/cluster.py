"""What the supervisor of rank 0's node, the lead, costs as a job gets more nodes.

Measured, for each size: a job of so many nodes on this machine. Each node has a real supervisor
(`supervisor_host`), whose links, calls and CURVE are those of a job over several machines, and an
echo engine. What differs: this process is the guardian of all supervisors and attaches in place of
the ranks, there is no rollout manager, and the network is the loopback of a namespace of its own.

- `join_s`: from the news of all nodes until the last one is linked to the lead
- `engines_s`: from creating a pool with an engine on each node until all serve
- `pause_ms`, `pause_max_ms`: from the call that pauses the pool at the lead until all engines have
  acknowledged it: median and maximum; `pause_cpu_s` of the lead's processor. `pause_first_ms`: of
  the pool's first pause, which is not among them
- `rest_kb_per_s`: all bytes through the loopback at rest, both directions and the headers of IP and
  tcp included, for each node but the lead; `lead_kb_per_s` is their sum
- `lead_core`: the lead's processor seconds per second at rest; `lead_mb` its resident memory, and
  `lead_fds` its open files
- `lost_s`, `lost_known_s`: from stopping a node's supervisor (SIGSTOP: it sends nothing more) until
  the lead's ranks are notified, and those of all other nodes

Modelled, for 8 to 4,096 nodes of one engine and one rank: `cluster_model`, with the costs of this
run, which are in the first table's column "umbra". Those of links for weights come from
`cluster_links.py`. That column of the second table has the numbers of nodes from which on

- `max_nodes_join`: joining takes longer than the silence that counts as lost
- `max_nodes_rest`, `max_nodes_load`: heartbeats, or watching engines that load weights, need more
  than a core of the lead
- `max_nodes_fds`: a rank needs more than 1,024 open files for its links to nodes
- `max_nodes_pause`: a pause takes more than 50 ms

    python tests/bench/cluster.py [--nodes 2,8,16,64] [--rounds 15] [--rest-s 24] [--json]

Needs `unshare`, and root or user namespaces.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any, Final

import cluster_model
import uvloop
from bench_hardware import describe_hardware
from bench_namespace import IN_NAMESPACE, loopback_nbytes, run_in_namespace
from bench_options import options_parser, positive
from bench_programs import BenchError
from cluster_model import ClusterCosts
from result_table import print_result

from umbra.runtime.cli.umbra_command import umbra_version
from umbra.runtime.cluster.job_nodes import JobNode
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.child_process import resident_nbytes
from umbra.runtime.process.descendants import kill_all_descendants
from umbra.runtime.process.prctl import become_subreaper
from umbra.runtime.rpc.actor_ref import ActorRef
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.wire import Encoder
from umbra.runtime.settings import to_wire
from umbra.runtime.supervisor_host import SupervisorConfig
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.nccl.link_progress import ImageFollower, LinkProgress
from umbra.runtime.weights.transports.shared_memory.node_images import ImageOrder

_LINKS: Final = Path(__file__).with_name("cluster_links.py")
_NUM_LINKS: Final = 64
_NICENESS: Final = -15
_POOL: Final = "echo"
_LIMIT_S: Final = 300.0
_SETTLE_S: Final = 3.0  # from the engines' start to the measurement at rest
_MODELLED: Final = (8, 64, 256, 512, 1024, 2048, 4096)
_NUM_TENSORS: Final = 399  # of a Qwen3-8B
_LOG_LEVEL: Final = 30


def main() -> int:
    parser = options_parser(__doc__)
    parser.set_defaults(rounds=15)
    parser.add_argument(
        "--nodes", type=_sizes, default=[2, 8, 16, 64], help="sizes of jobs (default 2,8,16,64)"
    )
    parser.add_argument(
        "--rest-s", type=positive, default=24, help="seconds at rest that are measured (24)"
    )
    given = parser.parse_args()
    if IN_NAMESPACE not in os.environ:
        return run_in_namespace()
    become_subreaper()
    measured: dict[str, dict[str, float]] = {}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for num_nodes in given.nodes:
            try:
                facts = runner.run(_measure(num_nodes, given.rounds, given.rest_s))
            finally:
                kill_all_descendants(10.0)
            measured[f"{num_nodes} nodes"] = facts
    costs = _costs(list(measured.values()))
    about: dict[str, Any] = {
        "hardware": describe_hardware(),
        "versions": {"umbra": umbra_version(), "pyzmq": version("pyzmq")},
        "rounds": given.rounds,
    }
    sizes = {name: _shown(facts) for name, facts in measured.items()}
    result = {"bench": "cluster, measured", **about, "umbra": _shown_costs(costs), **sizes}
    modelled = {str(n): _rounded(cluster_model.model(n, costs)) for n in _MODELLED}
    limits = cluster_model.most_nodes(costs)
    if given.json:
        return print_result(result | {"model": modelled, "limits": limits}, as_json=True)
    print_result(result, as_json=False)
    return print_result(
        {"bench": "cluster, modelled", **about, "umbra": limits, **modelled}, as_json=False
    )


def _sizes(text: str) -> list[int]:
    return sorted(max(2, positive(part)) for part in text.split(","))


# -- a job on this machine ---------------------------------------------------------------------


class _Job:
    """Supervisors that are ready, not yet linked.

    Attributes:
        lead_pid, last_pid: the supervisors of the first and of the last node.
        lost: set for each node when its rank is notified that the job is lost.
    """

    def __init__(self, folder: Path, num_nodes: int, client: Client) -> None:
        refs = [
            ActorRef(
                name=f"supervisor-{idx}",
                incarnation=1,
                node_id=client.node_id,
                ipc_endpoint=f"ipc://{folder / str(idx) / 'supervisor'}",
            )
            for idx in range(num_nodes)
        ]
        self.supervisors: list[Handle] = [client.handle(ref) for ref in refs]
        self.nodes: list[JobNode] = []
        self.lost = [asyncio.Event() for _ in refs]
        self.lead_pid = 0
        self.last_pid = 0
        self.ready_s = 0.0

    @property
    def lead(self) -> Handle:
        return self.supervisors[0]

    async def attach(self, idx: int) -> None:
        """Takes the place of a rank on a node until the job is lost."""
        arguments = (idx, 1, os.getpid(), 1, False)
        async with self.supervisors[idx].stream("attach", *arguments, timeout_s=None) as events:
            async for event in events:
                if event["kind"] == "failed":
                    self.lost[idx].set()
                    return

    async def join(self) -> None:
        """Links all nodes."""
        nodes = [to_wire(node) for node in self.nodes]
        async with asyncio.TaskGroup() as tasks:
            for idx, supervisor in enumerate(self.supervisors):
                call = supervisor.call("join_job", nodes, idx, 1, _LIMIT_S, timeout_s=_LIMIT_S)
                tasks.create_task(call)


@asynccontextmanager
async def _job(folder: Path, num_nodes: int) -> AsyncGenerator[_Job]:
    keys = folder / "keys"
    CurveKeys.generate().save(keys)
    configs = [_config(folder, idx, keys) for idx in range(num_nodes)]
    processes: list[asyncio.subprocess.Process] = []
    ready_s: list[float] = []
    try:
        async with Client("bench") as client:
            job = _Job(folder, num_nodes, client)
            async with asyncio.TaskGroup() as tasks:
                ranks: list[asyncio.Task[None]] = []
                for idx, config in enumerate(configs):  # one after the other: each has a core
                    started_at = time.perf_counter()
                    process, endpoint = await _start(config)
                    processes.append(process)
                    ready_s.append(time.perf_counter() - started_at)
                    node = JobNode(node_id=config.node_id, num_ranks=1, tcp_endpoint=endpoint)
                    job.nodes.append(node)
                    ranks.append(tasks.create_task(job.attach(idx)))
                job.lead_pid, job.last_pid = processes[0].pid, processes[-1].pid
                job.ready_s = statistics.median(ready_s)
                yield job
                for rank in ranks:
                    rank.cancel()
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _config(folder: Path, idx: int, keys: Path) -> SupervisorConfig:
    logs = folder / str(idx) / "logs"
    logs.mkdir(parents=True)
    return SupervisorConfig(
        node_id=f"node-{idx}",
        log_dir=str(logs),
        run_dir=str(folder),
        is_lead=idx == 0,
        socket_dir=str(folder / str(idx)),
        tcp_host="127.0.0.1",
        secret_file=str(keys),
        log_level=_LOG_LEVEL,
    )


async def _start(config: SupervisorConfig) -> tuple[asyncio.subprocess.Process, str]:
    """Starts a supervisor as a guardian does; returns its tcp endpoint, too."""
    ready, write_end = os.pipe()
    with os.fdopen(ready, "rb") as reader:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "umbra.runtime.supervisor_host"),
                *("--ready-fd", str(write_end), "--guardian-pid", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[write_end],
            )
        finally:
            os.close(write_end)
        async with asyncio.timeout(_LIMIT_S):
            assert process.stdin is not None
            process.stdin.write(config.to_json())
            process.stdin.close()
            line = await asyncio.to_thread(reader.readline)
    if not line:
        raise BenchError("a supervisor did not start; its error is above")
    _favour(process.pid)
    endpoint: str = json.loads(line)["tcp_endpoint"]
    return process, endpoint


def _favour(pid: int) -> None:
    """Lets a supervisor run before any engine, if the user may do that. Else the engines of all
    nodes, which start at once on the few cores here, keep it silent until it counts as lost."""
    with suppress(PermissionError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            policy = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK  # engines get the usual priority
            os.sched_setscheduler(int(thread), policy, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)


# -- measurements ------------------------------------------------------------------------------


async def _measure(num_nodes: int, num_pauses: int, rest_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        async with _job(Path(name), num_nodes) as job:
            facts = {"num_nodes": float(num_nodes), "ready_s": job.ready_s}
            before_nbytes = resident_nbytes(job.lead_pid)
            facts |= await _timed("join", job.lead_pid, job.join())
            facts |= await _timed("engines", job.lead_pid, _create_pool(job))
            await asyncio.sleep(_SETTLE_S)
            facts |= await _rest(job.lead_pid, rest_s)
            facts |= await _pauses(job, num_pauses)
            facts["lead_mb"] = resident_nbytes(job.lead_pid) / 1e6
            facts["lead_added_mb"] = facts["lead_mb"] - before_nbytes / 1e6
            facts["lead_fds"] = float(len(os.listdir(f"/proc/{job.lead_pid}/fd")))
            return facts | await _lose_last(job)


async def _timed(name: str, pid: int, work: Awaitable[object]) -> dict[str, float]:
    """Wall time of `work`, and the processor time of a process meanwhile."""
    cpu_s, started_at = _cpu_s(pid), time.perf_counter()
    await work
    return {
        f"{name}_s": time.perf_counter() - started_at,
        f"{name}_cpu_s": _cpu_s(pid) - cpu_s,
    }


async def _create_pool(job: _Job) -> None:
    spec = PoolSpec(
        name=_POOL,
        engine="echo",
        count=len(job.nodes),
        mode="standalone",
        load_weights=True,
        engine_nodes=tuple(range(len(job.nodes))),
    )
    await job.lead.call("create_pool", to_wire(spec), timeout_s=_LIMIT_S)


async def _rest(lead_pid: int, rest_s: float) -> dict[str, float]:
    nbytes, cpu_s, started_at = loopback_nbytes(), _cpu_s(lead_pid), time.perf_counter()
    await asyncio.sleep(rest_s)
    passed_s = time.perf_counter() - started_at
    return {
        "lead_kb_per_s": (loopback_nbytes() - nbytes) / passed_s / 1e3,
        "lead_core": (_cpu_s(lead_pid) - cpu_s) / passed_s,
    }


async def _pauses(job: _Job, num_pauses: int) -> dict[str, float]:
    took_s: list[float] = []
    cpu_s: list[float] = []
    nbytes: list[int] = []
    for _ in range(1 + num_pauses):
        nbytes_before = loopback_nbytes()
        call = job.lead.call("pool_pause", _POOL, "abort", _LIMIT_S, timeout_s=_LIMIT_S)
        facts = await _timed("pause", job.lead_pid, call)
        took_s.append(facts["pause_s"])
        cpu_s.append(facts["pause_cpu_s"])
        nbytes.append(loopback_nbytes() - nbytes_before)
        states = await job.lead.call("pool_states", _POOL)
        if any(state["state"] != "PAUSED" for state in states):
            raise BenchError(f"not all engines are paused: {states}")
        await job.lead.call("pool_resume", _POOL, _LIMIT_S, timeout_s=_LIMIT_S)
        await asyncio.sleep(0.1)
    return {
        "pause_first_ms": 1e3 * took_s[0],
        "pause_ms": 1e3 * statistics.median(took_s[1:]),
        "pause_max_ms": 1e3 * max(took_s[1:]),
        "pause_cpu_s": statistics.median(cpu_s[1:]),
        "pause_nbytes": statistics.median(nbytes[1:]),
    }


async def _lose_last(job: _Job) -> dict[str, float]:
    os.kill(job.last_pid, SIGSTOP)
    started_at = time.perf_counter()
    async with asyncio.timeout(_LIMIT_S):
        await job.lost[0].wait()
        lost_s = time.perf_counter() - started_at
        for lost in job.lost[:-1]:
            await lost.wait()
    known_s = time.perf_counter() - started_at
    os.kill(job.last_pid, SIGKILL)
    return {"lost_s": lost_s, "lost_known_s": known_s}


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far, of all its threads that live."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _shown(facts: dict[str, float]) -> dict[str, float]:
    return _rounded({**facts, "rest_kb_per_s": facts["lead_kb_per_s"] / (facts["num_nodes"] - 1)})


def _shown_costs(costs: ClusterCosts) -> dict[str, float]:
    """Processor times in microseconds."""
    shown: dict[str, float] = {}
    for name, value in asdict(costs).items():
        is_short = name.endswith("cpu_s")
        shown[name.removesuffix("s") + "us" if is_short else name] = value * (
            1e6 if is_short else 1
        )
    return _rounded(shown)


def _rounded(facts: dict[str, float]) -> dict[str, float]:
    return {
        name: round(value) if value >= 1000 else float(f"{value:.3g}")
        for name, value in facts.items()
    }


# -- costs for the model -----------------------------------------------------------------------


def _costs(rows: Sequence[dict[str, float]]) -> ClusterCosts:
    """What each further node adds, from the smallest to the largest job that was measured."""
    small, large = rows[0], rows[-1]

    def for_each(name: str) -> float:
        if large is small:
            return large[name] / large["num_nodes"]
        return (large[name] - small[name]) / (large["num_nodes"] - small["num_nodes"])

    manifest_cpu_s, manifest_nbytes = _manifest_costs()
    return ClusterCosts(
        ready_s=small["ready_s"],
        join_cpu_s=for_each("join_cpu_s"),
        engine_s=small["engines_s"],
        engine_cpu_s=for_each("engines_cpu_s"),
        call_cpu_s=for_each("pause_cpu_s"),
        call_s=small["pause_ms"] / 1e3,
        call_nbytes=for_each("pause_nbytes"),
        manifest_cpu_s=manifest_cpu_s,
        manifest_nbytes=manifest_nbytes,
        look_cpu_s=_look_cpu_s(),
        **_link_costs(),
        rest_cpu_s=for_each("lead_core"),
        rest_nbytes=1e3 * large["lead_kb_per_s"] / (large["num_nodes"] - 1),
    )


def _manifest_costs() -> tuple[float, float]:
    """Seconds of encoding the layout of a model's weights, as for each engine of a sync; bytes."""
    manifest = Manifest.layout(
        (f"model.layers.{idx}.self_attn.q_proj.weight", "bfloat16", (4096, 4096))
        for idx in range(_NUM_TENSORS)
    )
    encoder = Encoder()
    header, _ = encoder.encode(manifest.to_wire())
    return _fastest_s(lambda: encoder.encode(manifest.to_wire())), float(len(header))


def _link_costs() -> dict[str, float]:
    """In a process of its own, because it imports torch."""
    command = [sys.executable, str(_LINKS), str(_NUM_LINKS)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=_LIMIT_S, check=True)
    facts: dict[str, float] = json.loads(ended.stdout)
    return facts


def _look_cpu_s() -> float:
    num_ranks, num_engines = 1000, 8
    order = ImageOrder(
        pool="look",
        image_nbytes=100 << 20,
        bucket_nbytes=1 << 20,
        num_ranks=num_ranks,
        num_engines=num_engines,
    )
    engines = range(num_engines)
    node = ImageFollower(0, [], "node", order, engines, has_receiver=True)
    progress = LinkProgress(num_ranks, [node], [])

    def look() -> None:
        progress.num_loaded(0)
        progress.is_cut_off(0)
        progress.has_work(0)

    return _fastest_s(look)


def _fastest_s(work: Callable[[], object]) -> float:
    times_s: list[float] = []
    for _ in range(20):
        started_at = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_at)
    return min(times_s)


if __name__ == "__main__":
    sys.exit(main())
