"""How long a job of several nodes takes from its start to its first step, beside bare torchrun.

The nodes are network namespaces of this machine, with a torchrun and one rank each. In turn:

- `umbra`: the quickstart's model and data, with an engine on each node. `first_step_s` lasts from
  the start of the torchruns until the first step is logged: all ranks, engines, the rollout manager
  and workers have started, the engines have got weights and generated, and the ranks have trained
- `bare`: `bare_rank.py` imports the same packages, loads the model and does one all-reduce.
  `first_step_s` lasts until that is done

`beyond_s` is the median of umbra's times less that of the others'.

    python tests/bench/node_start.py [--nodes 4] [--rounds 5] [--json]

Needs root, `ip` and `iptables`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final

from bench_hardware import describe_hardware
from bench_options import options_parser, positive
from bench_programs import BenchError
from bench_rounds import Facts, show_progress
from result_table import print_result

from umbra.runtime.cli.umbra_command import umbra_version
from umbra.runtime.process.descendants import kill_all_descendants
from umbra.runtime.process.prctl import become_subreaper
from umbra.trainer.quickstart.quickstart_assets import ensure_assets
from umbra.trainer.reporting.metrics_log import read_metrics

_TESTS: Final = Path(__file__).resolve().parents[1]
sys.path += [str(_TESTS / "cluster"), str(_TESTS / "shared" / "runtime")]

from network import Hosts  # noqa: E402
from node_jobs import NodeJob  # noqa: E402

_CONFIG: Final = _TESTS.parent / "launch/configs/quickstart.toml"
_BARE: Final = Path(__file__).with_name("bare_rank.py")
_LIMIT_S: Final = 300.0
_END_LIMIT_S: Final = 60.0
_POLL_S: Final = 0.01


class Starts:
    """Starts jobs on the same nodes, one at a time.

    Args:
        folder: holds the model, the data, and a folder for each job.
    """

    def __init__(self, hosts: Hosts, num_nodes: int, folder: Path) -> None:
        self._hosts = hosts
        self._num_nodes = num_nodes
        self._folder = folder
        self._assets = folder / "assets"
        ensure_assets(self._assets, seed=0)

    def umbra(self, idx: int) -> float:
        """Seconds until the first step is logged."""
        home = self._folder / f"umbra-{idx}"
        run_dir = home / "run"
        program = [
            *("-m", "umbra.trainer", str(_CONFIG), f"run.dir={run_dir}"),
            *(f"model.path={self._assets}/model", f"data.train={self._assets}/train.jsonl"),
            *("data.eval=", f"pool.count={self._num_nodes}"),
            *("train.steps=1", "train.export=false"),
        ]
        environments = {
            node: {
                "HOME": str(home),
                "UMBRA_SOCKET_ROOT": str(home / "sockets"),
                "UMBRA_HOST_ADDRESS": self._hosts.address(node),
            }
            for node in range(self._num_nodes)
        }
        (home / "sockets").mkdir(parents=True, mode=0o700)
        return self._time(
            home, program, environments, lambda: bool(read_metrics(run_dir / "metrics.jsonl"))
        )

    def bare(self, idx: int) -> float:
        """Seconds until the all-reduce is done."""
        home = self._folder / f"bare-{idx}"
        home.mkdir()
        program = [str(_BARE), str(self._assets / "model"), str(home / "done")]
        return self._time(home, program, {}, (home / "done").exists)

    def _time(
        self,
        home: Path,
        program: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        is_done: Callable[[], bool],
    ) -> float:
        begin = time.monotonic()
        job = NodeJob(self._hosts, home, self._num_nodes, program, environments=environments)
        with job:
            while not is_done():
                if time.monotonic() > begin + _LIMIT_S or any(a.poll() for a in job.agents):
                    texts = "\n".join(map(job.text, range(self._num_nodes)))
                    raise BenchError(f"not started within {_LIMIT_S:g} s, or failed:\n{texts}")
                time.sleep(_POLL_S)
            taken_s = time.monotonic() - begin
            job.wait(_END_LIMIT_S)
        kill_all_descendants(deadline_s=_END_LIMIT_S)
        return taken_s


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--nodes", type=positive, default=4, help="nodes of each job (default 4)")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it for several ranks of a node
    become_subreaper()
    taken_s: dict[str, list[float]] = {"umbra": [], "bare": []}
    with (
        tempfile.TemporaryDirectory(prefix="umbra-") as folder,
        Hosts(given.nodes) as hosts,
    ):
        starts = Starts(hosts, given.nodes, Path(folder))
        for idx in range(given.rounds):
            pair = [("umbra", starts.umbra), ("bare", starts.bare)]
            for name, start in pair if idx % 2 else reversed(pair):
                show_progress(f"round {idx + 1} of {given.rounds}: {name}")
                taken_s[name].append(start(idx))
    medians = {name: median(times) for name, times in taken_s.items()}
    result: Facts = {
        "bench": "node_start",
        "hardware": describe_hardware(),
        "versions": {"umbra": umbra_version(), "bare": version("torch")},
        "rounds": given.rounds,
        "nodes": given.nodes,
        "beyond_s": round(medians["umbra"] - medians["bare"], 2),
    }
    for name, times in taken_s.items():
        result[name] = {
            "first_step_s": round(medians[name], 2),
            "shortest_s": round(min(times), 2),
            "longest_s": round(max(times), 2),
        }
    return print_result(result, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
