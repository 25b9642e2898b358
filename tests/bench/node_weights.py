"""Weight syncs to an engine of another node: all weights beside what has changed.

A job of two nodes on one machine has an echo engine on the second one. Before each version, a share
of the bfloat16 values changes. One pool always gets all weights, another one gets what has changed
(`pool.full_sync_every`). Per pool, medians over all syncs but the first: `sync_s` of a rank's
`publish`, its `rank_cpu_s`, and `network_mb`, the weights that cross the network. `--gbit` limits
the speed of the network (as root, with `unshare`, `ip` and `tc`).

    python tests/bench/node_weights.py [--changed 0.01] [--megabytes 512] [--gbit 10] [--rounds 5]
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from bench_report import describe, median_of, options_parser, positive, progress
from torch import Tensor

from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher

_NEVER: Final = 1 << 30
_POOLS: Final = {"all": 1, "changed": _NEVER}
"""Pool -> `full_sync_every`."""
_TENSOR_LEN: Final = 1 << 22
_TIMEOUT_S: Final = 120.0
_IN_NAMESPACE: Final = "UMBRA_BENCH_IN_NAMESPACE"


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--changed", type=float, default=0.01, help="share (default 0.01)")
    parser.add_argument("--megabytes", type=positive, default=512, help="of weights (default 512)")
    parser.add_argument("--gbit", type=positive, help="per second (default: the loopback's speed)")
    given = parser.parse_args()
    if given.gbit and _IN_NAMESPACE not in os.environ:
        return _run_in_namespace(given.gbit)
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as folder:
        pools = _measure(Path(folder), given.megabytes * 10**6, given.changed, given.rounds)
    result: dict[str, Any] = {
        "bench": "node_weights",
        **describe("torch"),
        "rounds": given.rounds,
        **pools,
        "changed_share": given.changed,
        "gbit": given.gbit,
    }
    print(json.dumps(result, indent=2))
    return 0


def _run_in_namespace(gbit: int) -> int:
    """Runs this script again in a network namespace with a loopback of that speed."""
    limit = f"rate {gbit}gbit burst 256k latency 50ms"
    script = shlex.join([sys.executable, *sys.argv])
    steps = ["ip link set lo up", f"tc qdisc add dev lo root tbf {limit}", f"exec {script}"]
    command = ["unshare", "--net", "sh", "-c", " && ".join(steps)]
    return subprocess.run(command, env={**os.environ, _IN_NAMESPACE: "1"}, check=False).returncode


def _measure(folder: Path, nbytes: int, changed: float, rounds: int) -> dict[str, dict[str, Any]]:
    lengths = [_TENSOR_LEN] * max(1, nbytes // 2 // _TENSOR_LEN)
    tensors = {f"layer{idx}": torch.randn(num).bfloat16() for idx, num in enumerate(lengths)}
    config = SessionConfig(run_dir=folder / "run", tcp_host="127.0.0.1")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in _POOLS}
    with Session.from_torchrun(config) as session, _second_node(folder):
        for name, full_sync_every in _POOLS.items():
            _start_pool(session, name, full_sync_every)
        publishers = {name: WeightPublisher(session, tensors) for name in _POOLS}
        for number in range(1 + rounds):
            _change(tensors, changed)
            for name, publisher in publishers.items():
                began, cpu_began = time.perf_counter(), time.process_time()
                report = publisher.publish(name, number, _TIMEOUT_S)
                took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
                progress(f"version {number} to {name}: {took_s:.2f} s")
                network_mb = report.network_nbytes / 1e6
                row = {"sync_s": took_s, "network_mb": network_mb, "rank_cpu_s": cpu_s}
                rows[name].append(row)
        for publisher in publishers.values():
            publisher.close()
    return {name: median_of(found[1:]) for name, found in rows.items()}


def _start_pool(session: Session, name: str, full_sync_every: int) -> None:
    """Returns when the engine waits for weights."""
    pool = session.create_pool(
        PoolSpec(
            name=name,
            engine="echo",
            count=1,
            engine_nodes=(1,),
            mode="standalone",
            kwargs={"verify_checksums": True},
            verify_every=_NEVER,
            full_sync_every=full_sync_every,
        )
    )
    deadline = time.monotonic() + _TIMEOUT_S
    while any(row["state"] != "PENDING_WEIGHTS" for row in pool.states()):
        assert time.monotonic() < deadline, pool.states()
        time.sleep(0.05)


@contextmanager
def _second_node(folder: Path) -> Generator[None]:
    command = [sys.executable, "-m", "umbra.runtime.node", "--join", str(folder / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True) as node:
        assert node.stdout is not None
        while "joined" not in (line := node.stdout.readline()):
            assert line, "the second node ended"
        try:
            yield
        finally:
            node.terminate()
            node.communicate(timeout=_TIMEOUT_S)


def _change(tensors: dict[str, Tensor], share: float) -> None:
    for tensor in tensors.values():
        places = torch.randint(len(tensor), (round(share * len(tensor)),))
        tensor.view(torch.int16)[places] ^= 1


if __name__ == "__main__":
    sys.exit(main())
