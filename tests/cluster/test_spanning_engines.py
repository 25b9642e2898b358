"""An engine on several nodes: a real vLLM on the CPU, with a worker on each of two hosts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from actor_specs import PROGRAMS
from model_factory import make_model, save_model
from network import Hosts
from node_jobs import NodeJob, assert_nothing_left
from process_runs import assert_ended
from rank_processes import read_events
from vllm_runs import needs_vllm
from watching import processes, tree

from umbra.runtime.process import descendants

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.cluster,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

SHARED = Path(__file__).parents[1] / "shared"
START_LIMIT_S = 640.0
END_LIMIT_S = 30.0


def expected_tokens(version: int) -> list[int]:
    """Those of the whole model."""
    model, tokens = make_model("qwen3", version), [1, 2, 3]
    with torch.no_grad():
        for _ in range(20):
            logits = model(torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[3:]


def check_version(job: NodeJob, version: int) -> None:
    """Waits until the engine has generated with that version, and looks at its tokens."""
    deadline = time.monotonic() + START_LIMIT_S
    while not (events := read_events(job.outputs, f"version {version}")):
        assert all(agent.poll() is None for agent in job.agents), job.text(0) + job.text(1)
        assert time.monotonic() < deadline, job.text(0) + job.text(1)
        time.sleep(0.1)
    assert events[0]["tokens"] == expected_tokens(version)


def parts_of(run_dir: Path) -> tuple[list[int], list[int]]:
    """The engine's processes on both nodes: an actor, and all below it."""
    (other,) = (run_dir / "logs").glob("*/processes.json")
    leading, follower = processes(run_dir)["policy-0"], processes(other.parent)["policy-0.1"]
    return tree(int(str(leading["pid"]))), tree(int(str(follower["pid"])))


def test_an_engine_on_two_nodes_gets_weights_and_its_parts_die_together(
    hosts: Hosts, home: Path
) -> None:
    save_model(home / "model", "qwen3")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SHARED / "engines")])
    environments = {idx: {"PYTHONPATH": path} for idx in (0, 1)}
    program = [str(PROGRAMS / "spanning_rank.py"), str(home / "run"), str(home / "model")]

    with NodeJob(hosts, home, 2, program, environments=environments) as job:
        check_version(job, 1)
        check_version(job, 2)
        leading, follower = parts_of(home / "run")
        (worker,) = descendants.working_child_pids(follower[1])  # of its program
        os.kill(worker, signal.SIGKILL)
        assert_ended([*leading, *follower], END_LIMIT_S)

        check_version(job, 3)
        leading, follower = parts_of(home / "run")
        os.kill(leading[0], signal.SIGKILL)
        assert_ended([*leading, *follower[1:]], END_LIMIT_S)

        check_version(job, 4)
        assert parts_of(home / "run")[1][0] == follower[0]  # it waited for the engine
        assert job.wait(END_LIMIT_S) == [0, 0]
    assert_nothing_left(home)
