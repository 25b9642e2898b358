"""Supervisors of several nodes: they meet, pass on failures, survive a short cut and end together.

The hosts are network namespaces; torchrun runs on each of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from actor_specs import PROGRAMS
from network import Hosts
from node_jobs import PORT, NodeJob, assert_nothing_left
from rank_processes import poll, read_events
from run_traces import command_of
from watching import all_end
from zmq.utils import z85

from umbra.runtime.cluster.node_link import HEARTBEAT_S, LOST_AFTER_S
from umbra.runtime.cluster.run_requests import RunNotice
from umbra.runtime.rpc.curve_keys import CurveKeys

pytestmark = [pytest.mark.process, pytest.mark.cluster]

END_LIMIT_S = 10.0
"""Of a job whose ranks leave: a second or two, and the end of torchrun."""
MEET_LIMIT_S = 10.0
"""Of the scenario "absent"."""
REPORT_LIMIT_S = 30.0
"""Of a failure at the start: ranks import torch for it. Without a report, nodes wait 60 s."""


def ranks(home: Path, *scenario: str) -> list[str]:
    return [str(PROGRAMS / "rank.py"), str(home / "run"), *scenario]


def kill(job: NodeJob, engine: str) -> None:
    """Kills an engine of node 1."""
    (pid,) = (pid for pid in job.tree(1) if engine in command_of(pid))
    os.kill(pid, signal.SIGKILL)


def wait_for(job: NodeJob, event: str) -> None:
    poll(lambda: read_events(job.outputs, event), len(job.agents), event)


def test_ranks_of_all_nodes_find_what_is_on_rank_0s(hosts: Hosts, home: Path) -> None:
    several = ("--nproc-per-node", "2")
    with NodeJob(hosts, home, 3, ranks(home, "leave"), options=several) as job:
        assert job.wait() == [0, 0, 0]

    assert len(read_events(job.outputs, "met")) == 6
    assert len(list((home / "run").rglob("supervisor.log"))) == 3
    assert_nothing_left(home)


def test_a_rank_that_is_killed_is_named_on_every_node(hosts: Hosts, home: Path) -> None:
    with NodeJob(hosts, home, 2, ranks(home, "block")) as job:
        wait_for(job, "met")
        os.kill(read_events(job.outputs, "started")[1]["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        assert all(job.wait())

    failed = read_events(job.outputs, "failed")[0]
    assert failed["message"].startswith("rank 1 failed: its process")
    assert failed["at"] - killed_at < HEARTBEAT_S  # it is reported, not found to be silent
    assert_nothing_left(home)


def test_no_key_is_left_if_all_ranks_and_torchruns_are_killed_at_once(
    hosts: Hosts, home: Path
) -> None:
    with NodeJob(hosts, home, 2, ranks(home, "block")) as job:
        wait_for(job, "met")
        (keys,) = (home / "home").rglob("jobs/*")
        started = [event["pid"] for event in read_events(job.outputs, "started").values()]
        with all_end([pid for node in (0, 1) for pid in job.tree(node)]):
            for pid in (*(agent.pid for agent in job.agents), *started):
                os.kill(pid, signal.SIGKILL)

    assert not keys.exists()
    assert_nothing_left(home)


def test_a_node_that_dies_ends_the_job_on_the_others(hosts: Hosts, home: Path) -> None:
    """Each of the two takes the other one for dead: the lead loses a member, and that the lead."""
    with NodeJob(hosts, home, 2, ranks(home, "block")) as job:
        wait_for(job, "met")
        hosts.cut_off(1)  # as a host that loses its power: nobody says goodbye
        begin = time.monotonic()
        try:
            with all_end([pid for node in (0, 1) for pid in job.tree(node)]):
                statuses = job.wait()
        finally:
            hosts.reconnect(1)

    failed = read_events(job.outputs, "failed")
    assert all(statuses)
    for node in (0, 1):
        assert f"node {1 - node} (" in failed[node]["message"]
        assert "cannot be reached any more" in failed[node]["message"]
        assert failed[node]["at"] - begin < LOST_AFTER_S + HEARTBEAT_S
    assert RunNotice(home / "run").is_preempted
    assert_nothing_left(home)


def test_an_engine_lost_by_its_connection_only_is_named_on_both_nodes(
    hosts: Hosts, home: Path
) -> None:
    program = [str(PROGRAMS / "pool_rank.py"), str(home / "run")]
    with NodeJob(hosts, home, 2, program) as job:
        wait_for(job, "serving")
        there = read_events(job.outputs, "serving")[0]["supervisors"][1]
        hosts.reset_connections(1, int(there.rpartition(":")[2]))  # node 1's own link stays
        try:
            with all_end([pid for node in (0, 1) for pid in job.tree(node)]):
                statuses = job.wait()
        finally:
            hosts.reconnect(1)

    assert all(statuses)
    for node in (0, 1):
        assert "pool-1 failed: pool-1 is lost" in job.text(node)
    assert_nothing_left(home)


@pytest.mark.parametrize(
    ("name", "options", "environment", "said"),
    [
        ("none", (), {}, "start torchrun with --rdzv-id NAME"),
        ("job", ("--max-restarts", "1"), {}, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        ("job", (), {"UMBRA_SECRET_FILE": "{other_keys}"}, "has other keys than node 0"),
        ("job", (), {"UMBRA_HOST_ADDRESS": "127.0.0.1"}, "UMBRA_HOST_ADDRESS"),
    ],
)
def test_a_setup_that_cannot_work_is_explained_on_every_node(
    hosts: Hosts,
    home: Path,
    name: str,
    options: tuple[str, ...],
    environment: dict[str, str],
    said: str,
) -> None:
    CurveKeys.generate().save(home / "other_keys")
    of_node_1 = {
        key: value.format(other_keys=home / "other_keys") for key, value in environment.items()
    }
    program = ranks(home, "leave")

    with NodeJob(
        hosts, home, 2, program, rdzv_id=name, options=options, environments={1: of_node_1}
    ) as job:
        assert all(job.wait())

    for node in (0, 1):
        assert said in job.text(node)
    assert_nothing_left(home)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_cannot_start_is_named_on_the_others_at_once(
    hosts: Hosts, home: Path, failing: int
) -> None:
    wrong = {failing: {"UMBRA_LOG_LEVEL": "loud"}}
    with NodeJob(hosts, home, 3, ranks(home, "leave"), environments=wrong) as job:
        assert all(job.wait())

    failed = read_events(job.outputs, "failed")
    started = read_events(job.outputs, "started")
    for node in {0, 1, 2} - {failing}:
        assert f"node {failing} (" in failed[node]["message"]
        assert "failed: ConfigError: UMBRA_LOG_LEVEL is 'LOUD'" in failed[node]["message"]
        assert failed[node]["at"] - started[failing]["at"] < REPORT_LIMIT_S
    assert "ConfigError: UMBRA_LOG_LEVEL is 'LOUD'" in job.text(failing)
    assert_nothing_left(home)


def test_a_node_that_dies_before_it_has_met_the_others_is_named(hosts: Hosts, home: Path) -> None:
    with NodeJob(hosts, home, 2, ranks(home, "absent", "1")) as job:
        poll(lambda: read_events(job.outputs, "started"), 2, "started")
        hosts.cut_off(1)  # as a host that loses its power: nobody says goodbye
        try:
            for pid in job.tree(1):
                os.kill(pid, signal.SIGKILL)
            assert all(job.wait())
        finally:
            hosts.reconnect(1)

    failed = read_events(job.outputs, "failed")[0]
    started = read_events(job.outputs, "started")[0]
    assert "node 0 did not meet node 1 of 2 nodes within 10 s" in failed["message"]
    assert failed["at"] - started["at"] < MEET_LIMIT_S + REPORT_LIMIT_S
    assert_nothing_left(home)


def test_the_jobs_secret_key_is_in_no_log_command_environment_or_store(
    hosts: Hosts, home: Path
) -> None:
    with NodeJob(hosts, home, 2, ranks(home, "block")) as job:
        wait_for(job, "met")
        (key_file,) = (home / "home").rglob("jobs/*")
        secret = CurveKeys.load(key_file).secret
        processes = [Path("/proc", str(pid)) for node in (0, 1) for pid in job.tree(node)]
        seen = [(process / "cmdline").read_bytes() for process in processes]
        seen += [(process / "environ").read_bytes() for process in processes]
        seen.append((home / "run/supervisor.json").read_bytes())
        stored = home / "stored"
        program = [sys.executable, "-c", _STORED, hosts.address(0), str(PORT)]
        assert hosts.start(0, program, stored, {}).wait(REPORT_LIMIT_S) == 0, stored.read_text()
        os.kill(read_events(job.outputs, "started")[1]["pid"], signal.SIGKILL)
        job.wait()

    seen += [path.read_bytes() for path in [stored, *job.outputs, *(home / "run").rglob("*.log")]]
    text = b"".join(seen)
    assert f"tcp://{hosts.address(1)}:".encode() in stored.read_bytes()
    assert str(key_file).encode() in text  # where the key is, is no secret
    assert secret not in text
    assert z85.decode(secret) not in text
    assert_nothing_left(home)


_STORED = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False)
print({key: store.get(key) for key in store.list_keys()})
"""
"""Prints what torchrun's store has."""


def test_a_run_directory_that_is_not_shared_is_refused(hosts: Hosts, home: Path) -> None:
    (home / "elsewhere").mkdir()
    script = home / "elsewhere_on_node_1.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"os.chdir({str(home)!r} + ('/elsewhere' if os.environ['RANK'] == '1' else ''))\n"
        f"runpy.run_path({str(PROGRAMS / 'rank.py')!r}, run_name='__main__')\n"
    )
    with NodeJob(hosts, home, 2, [str(script), "run", "leave"]) as job:
        assert all(job.wait())

    for node in (0, 1):
        assert "node 1" in job.text(node)
        assert "is not the same directory there as on node 0" in job.text(node)
    assert_nothing_left(home)


LOOK_UP = """
import sys
from umbra.trainer.doctor.node_checks import slow_name_lookups
print([verdict.text for verdict in slow_name_lookups(sys.argv[1], 1)])
"""


def test_a_name_server_that_does_not_answer_is_a_warning(hosts: Hosts, home: Path) -> None:
    def looked_up() -> str:
        command = [sys.executable, "-c", LOOK_UP, hosts.address(2)]
        output = home / "lookup.log"
        assert hosts.start(0, command, output, {}).wait(3 * END_LIMIT_S) == 0
        return output.read_text()

    silent = f"nameserver {hosts.address(1)}\n"
    hosts.cut_off(1)
    try:
        with hosts.name_service(0, resolv_conf=silent):
            assert f"the look-up of {hosts.address(2)} in the name service took" in looked_up()
        with hosts.name_service(0, resolv_conf=silent, hosts=f"{hosts.address(2)} node2\n"):
            assert looked_up() == "[]\n"
    finally:
        hosts.reconnect(1)


def test_containers_of_one_host_name_differ_where_torchrun_is_process_1() -> None:
    program = "from umbra.runtime.cluster import environment as e; print(e.unique_pid(1)); input()"
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", program]
    containers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]

    names = {container.stdout.readline() for container in containers if container.stdout}
    for container in containers:
        container.communicate("end\n")

    assert len(names) == 2
    assert all(name.startswith("1-") for name in names)
