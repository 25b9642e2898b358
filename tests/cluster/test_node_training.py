"""Training over two nodes: the samples, tokens and logprobs of the same run on one node.

Both ranks are on one node in the run that the others are compared with.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from killed_jobs import KilledJob
from network import Hosts
from node_jobs import NodeJob, assert_nothing_left
from noted_loops import processes_of
from run_assets import write_assets
from run_traces import command_of
from trace_event_format import read_timeline
from trained_history import (
    History,
    check_exactly_once,
    check_ledger,
    check_order,
    check_same,
    surviving_history,
)
from whole_runs import HERE as FAULTS
from whole_runs import write_config

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.cluster.node_link import LOST_AFTER_S
from umbra.runtime.cluster.run_requests import RunNotice, SupervisorAddress
from umbra.runtime.process.descendants import child_pids
from umbra.trainer.checkpoint.run_dir import RunLock
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [pytest.mark.process, pytest.mark.cluster]

STEPS, GROUP_SIZE = 8, 2
SETTINGS = (
    "model.dtype=float64",  # an interrupted completion is then the uninterrupted one
    "pool.engine=auto",  # rank 0 chooses for both nodes
    "pool.engine_args={}",
    "pool.count=2",
    "reward.function=plain_rewards:distinct",
    "rollout.max_new_tokens=20",
    f"train.steps={STEPS}",
    "train.learning_rate=1e-2",
    "train.checkpoint_every=2",
)
HERE = (str(FAULTS), str(Path(__file__).parent))
START_LIMIT_S = 90.0
WAIT_LIMIT_S = 3.0
"""Of the ranks for a sync and a batch: a fifth of a second on idle cores."""
LATENCY_S = 0.05
SLOW_STEP_LIMIT_S = 10.0
"""Of the median step while each frame takes LATENCY_S longer: 3.2 s on idle cores."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


@pytest.fixture(scope="module")
def on_one_node(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> History:
    folder = tmp_path_factory.mktemp("one-node")
    write_config(folder, assets)
    with KilledJob(folder, SETTINGS, rng=random.Random(0)) as job:
        job.run_through([])
        return job.history()


class TwoNodes:
    """Incarnations of one job on two hosts."""

    def __init__(self, hosts: Hosts, home: Path) -> None:
        self._hosts = hosts
        self._home = home
        self._records = home / "records"
        self._records.mkdir()
        self._incarnation = 0

    def begin(self, *settings: str, num_nodes: int = 2, ranks_each: int = 1) -> NodeJob:
        self._incarnation += 1
        environment = {
            "RECORDED_IN": str(self._records),
            "RECORDED_INCARNATION": str(self._incarnation),
            "NOTED_IN": str(self._home),
            "PYTHONPATH": os.pathsep.join([*HERE, os.environ.get("PYTHONPATH", "")]),
        }
        program = ["-m", "recorded_trainer", str(self._home / "config.toml")]
        program += [f"run.dir={self._home / 'run'}", "run.resume=auto", *SETTINGS, *settings]
        environments = {
            node: {**environment, "UMBRA_HOST_ADDRESS": self._hosts.address(node)}
            for node in range(num_nodes)
        }
        return NodeJob(
            self._hosts,
            self._home,
            num_nodes,
            program,
            environments=environments,
            options=("--nproc-per-node", str(ranks_each)),
        )

    @contextmanager
    def joined(self, *, by_address: bool) -> Generator[subprocess.Popen[bytes]]:
        """Host 1 generates for the job of host 0: by its run directory, or without that by its
        address and a copy of its keys. Killed on exit."""
        run_dir = self._home / "run"
        how = [str(run_dir)]
        if by_address:
            job = self._address()
            how = [job.tcp_endpoint, "--secret-file", str(self._home / "keys")]
            shutil.copy(job.secret_file, self._home / "keys")
        else:
            run_dir.mkdir(exist_ok=True)
        there = ("env", "--chdir", str(self._home), sys.executable, "-m", "umbra.runtime.node")
        with self._hosts.start(1, [*there, "--join", *how], self.joined_log, {}) as program:
            try:
                yield program
            finally:
                if program.poll() is None:
                    program.kill()
        log_dir = (self._home if by_address else run_dir) / "logs"
        assert any(log_dir.glob("*/supervisor.log"))

    def _address(self) -> SupervisorAddress:
        deadline = time.monotonic() + START_LIMIT_S
        while (address := RunNotice(self._home / "run").address()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return address

    @property
    def joined_log(self) -> Path:
        return self._home / "joined.log"

    def wait_for_step(self, job: NodeJob, step: int) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not any(int(row["step"]) >= step for row in self.metrics()):
            assert all(agent.poll() is None for agent in job.agents), job.text(0) + job.text(1)
            assert time.monotonic() < deadline, job.text(0) + job.text(1)
            time.sleep(0.02)

    def metrics(self) -> list[dict[str, float]]:
        return read_metrics(self._home / "run" / "metrics.jsonl")

    def wait_for_actors(self, job: NodeJob, node: int, role: str, count: int) -> list[int]:
        """Process ids of the actors of a node, by the begin of their names."""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            actors = [
                pid
                for pid in job.tree(node)
                if any(word.startswith(f"{role}-") for word in command_of(pid))
            ]
            if len(actors) == count:
                return actors
            assert time.monotonic() < deadline, job.text(0) + job.text(1)
            time.sleep(0.02)

    def wait_for_engine(self, name: str) -> None:
        """Returns once an engine has got weights."""
        deadline = time.monotonic() + START_LIMIT_S
        log = self._home / "run" / "logs" / "supervisor.log"
        while not (log.exists() and re.search(f"version .* is on .*{name}", log.read_text())):
            assert time.monotonic() < deadline, self.joined_log.read_text()
            time.sleep(0.02)

    def release_rewards(self) -> None:
        """Ends the wait of `plain_rewards:distinct_once_released`."""
        (self._home / "released").touch()

    def check(self, reference: History) -> None:
        """Nothing was lost, repeated or different."""
        history = surviving_history(self._records)
        assert sorted(history) == list(range(STEPS))
        check_exactly_once(history)
        check_order(history, self._home / "run", group_size=GROUP_SIZE)
        check_ledger(history, self._home / "run")
        check_same(history, reference)
        assert_nothing_left(self._home)

    def check_trace(self, processes: set[str]) -> None:
        """The timeline has these processes of both nodes, and engines of both load weights."""
        path = self._home / "trace.json.gz"
        assert main(["trace", str(self._home / "run"), "-o", str(path)]) == 0
        events = read_timeline(path)
        names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert {name.split(" (")[0] for name in names} >= processes
        assert len({name.split(" (")[1] for name in names}) == 2
        loading = {event["pid"] for event in events if event["ph"] == "f"}
        assert len(loading) == sum(name.startswith("policy") for name in processes)


@pytest.fixture
def two_nodes(hosts: Hosts, home: Path, assets: Path) -> TwoNodes:
    write_config(home, assets)
    return TwoNodes(hosts, home)


def test_two_nodes_train_as_one_also_if_an_engine_and_a_worker_are_killed(
    two_nodes: TwoNodes, home: Path, on_one_node: History
) -> None:
    user_code = ("rollout.agent=noted_loops:run", "reward.function=noted_loops:score")
    with two_nodes.begin(*user_code, "pool.count=4") as job:
        two_nodes.wait_for_step(job, 2)
        (lead,) = two_nodes.wait_for_actors(job, 0, "worker", 1)
        (worker,) = two_nodes.wait_for_actors(job, 1, "worker", 1)
        # The first of two engines receives the weights for both.
        receiver, _ = sorted(two_nodes.wait_for_actors(job, 1, "policy", 2))
        os.kill(receiver, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        assert job.wait(2 * START_LIMIT_S) == [0, 0], job.text(0) + job.text(1)

    assert f"(pid {receiver}) killed by SIGKILL" in job.text(0)
    assert f"worker-1#1 (pid {worker}) killed by SIGKILL" in job.text(0)
    two_nodes.check(on_one_node)
    for kind in ("loop", "reward"):
        processes = processes_of(kind, home)
        # The two that were there first, and the successor of the one that was killed.
        assert {lead, worker} < processes
        assert len(processes) == 3


def test_an_error_of_one_node_before_its_session_ends_both(two_nodes: TwoNodes, home: Path) -> None:
    (home / "run").mkdir()
    with RunLock(home / "run"), two_nodes.begin() as job:
        assert all(job.wait())

    assert "in use by process" in job.text(0)
    assert "node 0 (" in job.text(1)
    assert "failed: ConfigError: run.dir: " in job.text(1)
    assert_nothing_left(home)


def test_a_slow_network_costs_only_time(
    hosts: Hosts, two_nodes: TwoNodes, on_one_node: History
) -> None:
    with hosts.delayed(1, LATENCY_S), two_nodes.begin() as job:
        assert job.wait(3 * START_LIMIT_S) == [0, 0], job.text(0) + job.text(1)

    steps_s = [float(row["time/step_s"]) for row in two_nodes.metrics() if "time/step_s" in row]
    assert 2 * LATENCY_S < statistics.median(steps_s) < SLOW_STEP_LIMIT_S, steps_s
    two_nodes.check(on_one_node)


def test_a_network_that_loses_packets_or_fails_for_three_seconds_costs_only_time(
    hosts: Hosts, two_nodes: TwoNodes, on_one_node: History
) -> None:
    """One after the other: after such a failure, tcp tries once before the node is lost."""
    with two_nodes.begin() as job:
        with hosts.losing(0.05):
            two_nodes.wait_for_step(job, 3)
            dropped = [hosts.num_dropped(host) for host in (0, 1)]
        hosts.cut_off(1)
        time.sleep(3.0)
        dropped.append(hosts.num_dropped(1))
        hosts.reconnect(1)
        assert job.wait(2 * START_LIMIT_S) == [0, 0], job.text(0) + job.text(1)

    assert min(dropped) > 0
    two_nodes.check(on_one_node)
    two_nodes.check_trace({"rank-0", "rank-1", "policy-0", "policy-1", "worker-1"})


def test_a_stop_signal_to_one_rank_stops_both_nodes_with_a_checkpoint(
    two_nodes: TwoNodes, on_one_node: History
) -> None:
    with two_nodes.begin("train.checkpoint_every=100") as job:
        two_nodes.wait_for_step(job, 3)
        (rank,) = (pid for pid in child_pids(job.agents[1].pid) if "-m" in command_of(pid))
        os.kill(rank, signal.SIGTERM)
        assert all(job.wait())

    assert "stopped by SIGTERM after" in job.text(0)
    with two_nodes.begin("pool.nodes=[1]") as job:
        two_nodes.wait_for_actors(job, 1, "policy", 2)
        assert job.wait() == [0, 0], job.text(0) + job.text(1)
    assert "resuming after step" in job.text(0)  # of a checkpoint that only the stop can have made
    two_nodes.check(on_one_node)


def test_a_dump_shows_both_nodes_also_if_the_supervisor_of_one_is_stopped(
    two_nodes: TwoNodes, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with two_nodes.begin("train.steps=100000") as job:
        two_nodes.wait_for_step(job, 1)
        (rank,) = (pid for pid in child_pids(job.agents[1].pid) if "-m" in command_of(pid))
        (supervisor,) = (
            pid
            for pid in job.tree(1)
            if "umbra.runtime.supervisor.supervisor_main" in command_of(pid)
            and not any(word.endswith("guardian.py") for word in command_of(pid))
        )

        assert main(["dump", str(home / "run")]) == 0
        whole = capsys.readouterr().out
        os.kill(supervisor, signal.SIGSTOP)
        os.kill(rank, signal.SIGSTOP)
        try:
            assert main(["dump", str(home / "run")]) == 0
        finally:
            os.kill(rank, signal.SIGCONT)
            os.kill(supervisor, signal.SIGCONT)
        partial = capsys.readouterr().out
        os.kill(job.agents[1].pid, signal.SIGTERM)
        job.wait()

    elsewhere = whole.partition("==== node-1: processes")[2]
    assert f"rank 1 (pid {rank}): " in elsewhere
    assert "worker-1 (pid " in elsewhere
    assert f"rank 1 (pid {rank}): " not in partial
    assert "this node does not answer" in partial.partition("==== node-1: processes")[2]


@pytest.mark.parametrize("fault", ["none", "cut off"])
def test_a_machine_that_only_generates_changes_nothing_whatever_happens_to_it(
    hosts: Hosts, two_nodes: TwoNodes, on_one_node: History, fault: str
) -> None:
    num_own = 0 if fault == "none" else 1
    held_back = "reward.function=plain_rewards:distinct_once_released"
    job_only = two_nodes.begin(f"pool.count={num_own}", held_back, num_nodes=1, ranks_each=2)
    with job_only as job, two_nodes.joined(by_address=fault == "cut off") as program:
        two_nodes.wait_for_engine(f"policy-{num_own}")
        two_nodes.release_rewards()
        begin = time.monotonic()
        if fault == "cut off":
            hosts.cut_off(1)
        try:
            assert job.wait() == [0], job.text(0)
        finally:
            hosts.reconnect(1)
        assert time.monotonic() - begin < LOST_AFTER_S + 15.0
        # The first step was held back.
        waits_s = [row["time/rollout_s"] + row["time/sync_s"] for row in two_nodes.metrics()[1:]]
        assert max(waits_s) < LOST_AFTER_S + WAIT_LIMIT_S, waits_s
        assert program.wait(START_LIMIT_S) == (0 if fault == "none" else 1)

    assert "node 1 (" in job.text(0)
    two_nodes.check(on_one_node)
    if fault == "none":
        two_nodes.check_trace({"rank-0", "rank-1", f"policy-{num_own}"})
