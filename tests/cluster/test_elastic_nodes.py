"""Training over nodes that come and go: torchrun restarts the ranks, supervisors and engines stay.

Node 0 is rank 0's as long as it takes part: torchrun sorts the nodes by their addresses.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from network import Hosts
from node_jobs import NodeJob, assert_nothing_left
from run_assets import write_assets
from run_traces import command_of
from trained_history import (
    check_exactly_once,
    check_ledger,
    check_metrics,
    check_order,
    surviving_history,
)
from watching import all_end
from whole_runs import HERE as FAULTS
from whole_runs import write_config

from umbra.runtime.cluster.node_link import LOST_AFTER_S
from umbra.runtime.cluster.run_requests import RunNotice
from umbra.runtime.cluster.socket_dir import sweep
from umbra.runtime.process.descendants import child_pids, process_stat
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.cluster]

GROUP_SIZE = 2
SETTINGS = (
    "pool.engine=embedded",
    "pool.engine_args={}",
    "reward.function=plain_rewards:distinct_after_a_while",
    "rollout.max_new_tokens=20",
    "train.learning_rate=1e-2",
    "train.checkpoint_every=2",
)
LIMIT_S = 120.0
"""For whatever is awaited, on a machine that has other things to do."""
OUT_LIMIT_S = LOST_AFTER_S + 2.0
"""From the loss of a node to the end of the others' ranks: their end takes half a second."""
FIRST_STEP_LIMIT_S = 30.0
"""From the new ranks' process group to their first step."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


class ElasticNodes:
    """A job under `torchrun --nnodes 2:4`. A context manager.

    Args:
        rendezvous: the host of torchrun's rendezvous.
        job: counts the jobs that use the folder.
    """

    def __init__(
        self,
        hosts: Hosts,
        home: Path,
        *,
        steps: int,
        num_nodes: int = 3,
        rendezvous: int = 0,
        job: int = 1,
    ) -> None:
        self.home = home
        self._steps = steps
        records = home / "records"
        records.mkdir(exist_ok=True)
        environment = {
            "RECORDED_IN": str(records),
            "RECORDED_INCARNATION": str(job),
            "PYTHONPATH": os.pathsep.join(
                [str(FAULTS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            ),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.job = NodeJob(
            hosts,
            home,
            num_nodes,
            [
                *("-m", "timed_trainer", str(home / "config.toml"), f"run.dir={home / 'run'}"),
                *("run.resume=auto", f"train.steps={steps}", *SETTINGS),
            ],
            options=(
                *("--nnodes", "2:4", "--max-restarts", "3", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"{hosts.address(rendezvous)}:29400"),
            ),
            environments={
                node: {
                    **environment,
                    "UMBRA_HOST_ADDRESS": hosts.address(node),
                    # No name of this machine means that host.
                    "PET_RDZV_CONF": f"last_call_timeout=2,is_host={int(node == rendezvous)}",
                }
                for node in range(4)
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.job.__exit__(*exc_info)

    def text(self) -> str:
        return "\n".join(self.job.text(node) for node in range(len(self.job.agents)))

    def await_step(self, after: int) -> int:
        """Waits for a later step than that; returns it."""
        path = self.home / "run" / "metrics.jsonl"

        def newest() -> int:
            return max((int(row["step"]) for row in read_metrics(path)), default=0)

        _await(lambda: newest() > after, self.text)
        return newest()

    def groups(self) -> dict[int, dict[int, dict[str, Any]]]:
        """The process groups that came up: their ranks' lines by rank, by incarnation."""
        found: dict[int, dict[int, dict[str, Any]]] = {}
        for line in self.text().splitlines():
            if line.startswith("{"):
                event = json.loads(line)
                found.setdefault(event["incarnation"], {})[event["rank"]] = event
        return found

    def await_group(self, incarnation: int, num_ranks: int) -> float:
        """Returns when all ranks were in it."""
        _await(lambda: len(self.groups().get(incarnation, ())) == num_ranks, self.text)
        return max(event["at"] for event in self.groups()[incarnation].values())

    def kept(self, node: int) -> list[int]:
        """The processes of a node in its first epoch that outlive its ranks: guardian, supervisor
        and engine."""
        words = ("guardian", "supervisor_main", "policy-")
        commands = {pid: " ".join(command_of(pid)) for pid in self.job.tree(node)}
        return [pid for pid, text in commands.items() if any(word in text for word in words)]

    def ranks(self, node: int) -> list[int]:
        children = child_pids(self.job.agents[node].pid)
        return [pid for pid in children if "timed_trainer" in command_of(pid)]

    def check(self) -> None:
        """Each sample was trained on once, in the order of the data, and the ledger says so."""
        history = surviving_history(self.home / "records")
        assert sorted(history) == list(range(self._steps))
        check_exactly_once(history)
        check_order(history, self.home / "run", group_size=GROUP_SIZE)
        check_ledger(history, self.home / "run")
        check_metrics(history, self.home / "run")
        self.await_end()
        assert_nothing_left(self.home)

    def await_end(self) -> None:
        """Waits for the supervisors: those that outlived their first ranks end a moment after
        torchrun."""
        root = self.home / "umbra_socket_root"
        sweep(root)  # of a node that was killed
        _await(lambda: not any(root.iterdir()), self.text)


def _await(is_so: Callable[[], bool], describe: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.02)


@pytest.fixture
def home_of_run(home: Path, assets: Path) -> Path:
    write_config(home, assets)
    return home


@pytest.mark.parametrize(
    ("num_nodes", "lost", "how", "rendezvous"), [(4, 3, "killed", 0), (3, 0, "cut off", 1)]
)
def test_a_lost_node_costs_the_steps_since_the_last_checkpoint(
    hosts: Hosts, home_of_run: Path, num_nodes: int, lost: int, how: str, rendezvous: int
) -> None:
    others = [node for node in range(num_nodes) if node != lost]
    with ElasticNodes(
        hosts, home_of_run, steps=16, num_nodes=num_nodes, rendezvous=rendezvous
    ) as nodes:
        step = nodes.await_step(after=6)
        kept = [pid for node in others for pid in nodes.kept(node)]
        ranks = [pid for node in others for pid in nodes.ranks(node)]
        lost_tree = nodes.job.tree(lost)
        lost_torchrun, *umbras = lost_tree
        warm = nodes.kept(lost)
        lost_at = time.monotonic()
        if how == "killed":
            for pid in lost_tree:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            hosts.cut_off(lost)
        try:
            _await(lambda: all(process_stat(pid) is None for pid in ranks), nodes.text)
            out_s = time.monotonic() - lost_at
            group_at = nodes.await_group(incarnation=2, num_ranks=len(others))
            nodes.await_step(after=step)
            first_step_s = time.monotonic() - group_at
            assert all(process_stat(pid) is not None for pid in kept)
            for node in others:
                assert nodes.job.agents[node].wait(LIMIT_S) == 0, nodes.text()
            unreaped = [pid for pid in umbras if process_stat(pid)]
            with all_end([pid for pid in unreaped if pid not in warm], within_s=0.0):
                pass  # they have ended
            with all_end([pid for pid in unreaped if pid in warm]):
                if how == "cut off":  # it waits minutes for an answer, and they two for new ranks
                    os.kill(lost_torchrun, signal.SIGKILL)
        finally:
            hosts.reconnect(lost)

    print(f"ranks out after {out_s:.1f} s, first step {first_step_s:.1f} s after the group")
    assert out_s < OUT_LIMIT_S
    assert first_step_s < FIRST_STEP_LIMIT_S
    nodes.check()


def test_a_killed_rank_restarts_all_nodes_and_no_engine_and_a_generating_machine_leaves(
    hosts: Hosts, home_of_run: Path
) -> None:
    log = home_of_run / "joined.log"
    with ElasticNodes(hosts, home_of_run, steps=14, num_nodes=2) as nodes:
        nodes.await_step(after=1)
        kept = [pid for node in (0, 1) for pid in nodes.kept(node)]
        command = [sys.executable, "-m", "umbra.runtime.node", "--join", str(home_of_run / "run")]
        with hosts.start(2, command, log, {}) as program:
            try:
                _await(lambda: "joined as node 2" in log.read_text(), nodes.text)
                step = nodes.await_step(after=2)
                (rank,) = nodes.ranks(1)
                os.kill(rank, signal.SIGKILL)
                assert program.wait(LIMIT_S) == 1
            finally:
                program.kill()
        nodes.await_step(after=step)
        assert all(process_stat(pid) is not None for pid in kept)
        assert nodes.job.wait(LIMIT_S) == [0, 0], nodes.text()

    assert set(nodes.groups()) == {1, 2}
    assert "rank 1 failed: its process" in log.read_text()
    nodes.check()


def test_umbra_stop_ends_all_nodes_for_good_also_one_that_came_later(
    hosts: Hosts, home_of_run: Path
) -> None:
    with ElasticNodes(hosts, home_of_run, steps=1000, num_nodes=2) as nodes:
        nodes.await_step(after=0)
        kept = [pid for node in (0, 1) for pid in nodes.kept(node)]
        nodes.job.start_next()
        nodes.await_group(incarnation=2, num_ranks=3)
        assert all(process_stat(pid) is not None for pid in kept)
        nodes.await_step(after=nodes.await_step(after=0))
        command = [sys.executable, "-m", "umbra.runtime.cli.umbra_command", "stop"]
        subprocess.run([*command, str(home_of_run / "run")], check=True, timeout=LIMIT_S)
        step = nodes.await_step(after=0)
        assert all(nodes.job.wait(LIMIT_S)), nodes.text()

    assert (home_of_run / f"run/checkpoints/step-{step:06d}/COMPLETE").exists()
    assert set(nodes.groups()) == {1, 2}  # no ranks were started after it
    nodes.await_end()


def test_a_job_that_loses_its_lead_while_a_node_joins_continues_with_the_others(
    hosts: Hosts, home_of_run: Path
) -> None:
    with ElasticNodes(hosts, home_of_run, steps=12, num_nodes=2, rendezvous=1) as nodes:
        nodes.await_step(after=2)
        ranks = nodes.ranks(0)
        nodes.job.start_next()
        _await(lambda: all(process_stat(pid) is None for pid in ranks), nodes.text)
        for pid in nodes.job.tree(0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in (1, 2):
            assert nodes.job.agents[node].wait(2 * LIMIT_S) == 0, nodes.text()
    nodes.check()


def test_the_loss_of_the_rendezvous_ends_the_job_and_the_next_one_resumes_it(
    hosts: Hosts, home_of_run: Path
) -> None:
    steps = 16
    with ElasticNodes(hosts, home_of_run, steps=steps, rendezvous=1) as nodes:
        nodes.await_step(after=6)
        for pid in nodes.job.tree(1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        statuses = nodes.job.wait(2 * LIMIT_S)
    assert all(statuses)
    assert RunNotice(home_of_run / "run").is_preempted  # what train.sbatch reads
    nodes.await_end()

    with ElasticNodes(hosts, home_of_run, steps=steps, num_nodes=2, job=2) as nodes:
        assert nodes.job.wait(2 * LIMIT_S) == [0, 0], nodes.text()
    nodes.check()
