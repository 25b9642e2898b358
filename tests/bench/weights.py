"""How fast weights reach an engine, beside a plain copy of the same tensors.

What is counted: `first_s` and `later_s` are the wall time of `WeightPublisher.publish` in a rank
process with one thread: all calls to the supervisor, preparing the engine, filling the memfd
buckets, loading them into the parameters of an engine process, verification, commit. The first sync
makes, clears and maps the buckets and compares checksums of every byte; later ones (every 16th
excepted) compare the number of bytes only. `verified_gb_per_s` is for a sync that compares
checksums. The plain copy is `Tensor.copy_` of each tensor within the rank process, one thread,
memory present.
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
`transfer_s` (`load_s` is the engine's part of it), `verify_s` and `commit_s`. `prepare_s` comes
before it: the engine gets the description. It is paused all the time, so that no phase has pauses.

With `--engines-elsewhere N`, the rank is on one node and N engines are on another: weights travel
by links, over the loopback of a network namespace of its own. Of a round's syncs, all but
the first, `sync_s` is the median, and `rank_cpu_s` the median of the rank's processor time;
`network_mb` are all bytes through the loopback in one of them, with the headers of IP and tcp.
Needs `unshare`, and root or user namespaces. With `--device cuda`, too, the rank's tensors
are on the first GPU and the engines' on the second. With `--changed SHARE`, this share of the
bfloat16 values changes before each sync, and `delta_...` is the same of a pool that gets only these
(`full_sync_every`); the two pools get each version in turn. With `--gbit N`, the loopback carries
so many gigabits per second (`tc`, as root).

With `--engine`, a pool of one real engine with dummy weights gets its weights from ranks under
torchrun. It is hybrid on their GPUs, where it sleeps before each sync as in training, or standalone
on the next one, where it generates all the time. Printed is one case in the form of
docs/results/weights-h100.json; `sync_results.py` says what its numbers are. What it does is printed
to standard error meanwhile. All of it also runs on the cpu, for which there is the shape "tiny".

    python tests/bench/weights.py [--rounds 5] [--megabytes 1024] [--device cpu] [--json]
    python tests/bench/weights.py --engines-elsewhere 4 --megabytes 256 [--changed 0.01] [--gbit 10]
    python tests/bench/weights.py --device cuda [--shape 0.6B] [--dtype float32]
    python tests/bench/weights.py --device cuda --engine vllm --shape 8B --ranks 2
"""

from __future__ import annotations

import argparse
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
from bare_supervisor import bare_supervisor
from bench_hardware import describe_hardware
from bench_namespace import IN_NAMESPACE, run_in_namespace, slow_loopback
from bench_options import options_parser, positive
from bench_programs import BenchError
from qwen3_shapes import SHAPES
from result_table import print_result
from sync_case import SyncCase
from sync_job import measure_case

from umbra.runtime.cli.umbra_command import umbra_version
from umbra.runtime.cluster.environment import visible_gpus
from umbra.runtime.process.descendants import kill_tree
from umbra.runtime.process.nvml import count_gpus
from umbra.runtime.weights.sync_coordinator import SyncSettings

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
        choices=list(SHAPES),
        default="0.6B",
        help="of the model on a GPU, or of an engine's (default 0.6B)",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the ranks' tensors there (default float32)",
    )
    parser.add_argument(
        "--engines-elsewhere",
        type=int,
        default=0,
        help="number of engines on another node (default 0: one engine on the same node)",
    )
    parser.add_argument(
        "--changed", type=float, default=0.0, help="share of values that changes (default 0)"
    )
    parser.add_argument(
        "--gbit", type=positive, default=0, help="speed of the network (default: the loopback's)"
    )
    _add_case_options(parser)
    given = parser.parse_args()
    if given.engines_elsewhere and IN_NAMESPACE not in os.environ:
        return run_in_namespace()
    if given.engines_elsewhere and given.gbit:
        slow_loopback(given.gbit)
    case = _case(given) if given.engine else None
    if given.device == "cuda":
        num_gpus = 1 + bool(given.engines_elsewhere) if case is None else case.num_gpus
        num_found = len(visible_gpus(count_gpus()))  # without torch, whose import takes seconds
        if num_found < num_gpus:
            found = num_found or "no"
            parser.error(f"--device cuda needs {num_gpus}: there is {found} usable CUDA device")
    if case is not None:
        measured = measure_case(case)
        print(json.dumps(measured))
        return 0 if "copy_s" in measured else 1
    result: dict[str, Any] = {
        "bench": "weights",
        "hardware": describe_hardware(),
        "versions": {"torch": version("torch"), "umbra": umbra_version()},
        "rounds": given.rounds,
    }
    if given.device == "cuda" and not given.engines_elsewhere:
        result |= {"shape": given.shape, "dtype": given.dtype}
        result["umbra"] = _run_on_gpu(given.rounds, given.shape, given.dtype)
    elif given.engines_elsewhere:
        result["engines"] = given.engines_elsewhere
        result |= {"changed": given.changed, "gbit": given.gbit or None}
        result["umbra"] = _run_elsewhere(
            given.rounds,
            given.megabytes * 10**6,
            given.engines_elsewhere,
            given.device,
            given.changed,
        )
    else:
        result |= _run(given.rounds, given.megabytes * 10**6)
    return print_result(result, as_json=given.json)


def _add_case_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("an engine of a pool", "See SyncCase.")
    group.add_argument("--engine", choices=["embedded", "vllm", "sglang"], help="default: none")
    group.add_argument("--mode", choices=["hybrid", "standalone"], default="hybrid")
    group.add_argument(
        "--transport", choices=["memfd", "cuda_ipc"], help="default: cuda_ipc between GPUs"
    )
    group.add_argument("--ranks", type=positive, default=1)
    group.add_argument(
        "--requests",
        type=positive,
        default=64,
        help="that a standalone engine works on during the syncs (default 64)",
    )
    group.add_argument(
        "--syncs", type=positive, default=20, help="after the first one (default 20)"
    )
    group.add_argument(
        "--checksums", action="store_true", help="every second sync is with checksums"
    )
    group.add_argument(
        "--staged",
        action="store_true",
        help="a standalone vLLM reads each update into spare memory while it generates",
    )


def _case(given: argparse.Namespace) -> SyncCase:
    return SyncCase(
        shape=given.shape,
        dtype=given.dtype,
        device=given.device,
        engine=given.engine,
        mode=given.mode,
        transport=given.transport or ("memfd" if given.device == "cpu" else "cuda_ipc"),
        num_ranks=given.ranks,
        num_requests=given.requests if given.mode == "standalone" else 0,
        num_syncs=given.syncs,
        has_checksums=given.checksums,
        is_staged=given.staged,
    )


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
    rounds: int, total_nbytes: int, num_engines: int, device: str, changed: float
) -> dict[str, float]:
    pools = {"plain": SyncSettings(verify_every=_NEVER)}
    if changed:
        pools["delta"] = SyncSettings(verify_every=_NEVER, full_sync_every=_NEVER)
    names = [f"engine{idx}" for idx in range(num_engines)]
    devices = ["cpu", "cpu"] if device == "cpu" else ["cuda:0", "cuda:1"]
    arguments = [str(total_nbytes), *devices, str(changed)]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = [runner.run(_round(arguments, pools, "far_", names)) for _ in range(rounds)]
    return {key: round(value, 4) for key, value in _medians(rows).items()}


def _run_on_gpu(rounds: int, shape: str, dtype: str) -> dict[str, Any]:
    pools = {"cuda_ipc": SyncSettings(transport="cuda_ipc", verify_every=_NEVER)}
    if shape == "0.6B":
        pools = {
            f"{transport}{suffix}": SyncSettings(transport=transport, verify_every=every)
            for suffix, every in {"": _NEVER, "_verified": 1}.items()
            for transport in ("memfd", "cuda_ipc")
        }
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = [_gpu_round(runner, pools, [shape, dtype]) for _ in range(rounds)]
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
            bare_supervisor(folder, pools, names, "there" if prefix == "far_" else "here"),
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


if __name__ == "__main__":
    sys.exit(main())
