"""What a bundle finds, from what the nodes have reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from umbra.runtime.reports.hang_bundle import SeenNode, verdicts
from umbra.runtime.reports.job_state import JobState
from umbra.runtime.reports.process_report import SeenProcess, SeenThread

REWARD = "never_returns (/home/me/slow_rewards.py:5)"
LOSS = "loss (/home/me/stuck.py:7)"
REDUCE = "all_reduce (/lib/torch/distributed/distributed_c10d.py:3000)"
NEXT_BATCH = "_collect (/src/umbra/runtime/session/rollouts.py:180)"
Calls = Mapping[str, Mapping[str, Any]]


def process(name: str, pid: int, *threads: SeenThread, why_stuck: str = "") -> SeenProcess:
    return SeenProcess(
        name=name, pid=pid, command="python", state=why_stuck or "waiting", why_stuck=why_stuck,
        nbytes=0, threads=threads, problem="",
    )  # fmt: skip


def thread(place: str, name: str = "MainThread", user_place: str = "") -> SeenThread:
    return SeenThread(
        name=name,
        places=(place,),
        user_place=user_place,
        is_in_collective="/torch/distributed/" in place,
    )


def node(*processes: SeenProcess, calls: Calls | None = None, name: str = "") -> SeenNode:
    return SeenNode(name=name, processes=processes, calls=calls or {})


def found(*nodes: SeenNode) -> Sequence[str]:
    return verdicts(nodes, None)


def test_a_stopped_process_comes_first_with_what_lets_it_continue() -> None:
    working = thread(REWARD, user_place=REWARD)
    calls = {"worker-0": {"calls": [(10.2, "answers score([...])")], "tasks": []}}
    stopped = process("policy-0", 12, why_stuck="stopped by a signal")

    assert found(node(process("worker-0", 11, working), stopped, calls=calls)) == [
        "policy-0 (pid 12) is stopped by a signal: kill -CONT 12 lets it continue",
        f"worker-0 (pid 11) is in {REWARD}; its oldest call began 10 s ago",
    ]


@pytest.mark.parametrize("name", ["MainThread", "user-code-functions", "user-code-loop"])
def test_user_code_is_found_on_each_thread_that_a_worker_runs_it_on(name: str) -> None:
    user_code = thread("sleep (/lib/slow.py:3)", name, REWARD)
    serving = thread("decode (/umbra/runtime/text/model_tokenizer.py:9)", "actor")
    calls = {"worker-0": {"calls": [(10.2, "answers score([...])")], "tasks": []}}

    assert found(node(process("worker-0", 11, serving, user_code), calls=calls)) == [
        f"worker-0 (pid 11) is in {REWARD}; its oldest call began 10 s ago"
    ]


def test_asynchronous_user_code_is_found_among_the_tasks() -> None:
    inner = "never_answers (/home/me/slow_rewards.py:9)"
    own = "run_async (/site-packages/x.py:1)"
    tasks = [f"{own} > {inner}", f"{own} > {inner} > {own}", own]
    calls = {"worker-0": {"calls": [(10.2, "answers run_agent({...})")], "tasks": tasks}}

    assert found(node(process("worker-0", 11), calls=calls)) == [
        f"worker-0 (pid 11) is in {inner}; its oldest call began 10 s ago"
    ]


def test_a_call_that_has_just_begun_explains_nothing() -> None:
    calls = {"worker-0": {"calls": [(0.2, "answers score([...])")], "tasks": []}}

    assert found(node(process("worker-0", 11), calls=calls)) == []


def test_a_rank_that_the_others_wait_for_in_a_collective_is_named_on_its_node() -> None:
    first = node(process("rank 0", 1, thread(REDUCE)), name="node-0")
    second = node(
        process("rank 1", 2, thread(LOSS, user_place=LOSS)),
        process("rank 2", 3, thread(REDUCE)),
        name="node-1",
    )

    assert found(first, second) == [
        f"rank 1 (pid 2 on node-1) is in {LOSS}",
        "ranks 0, 2 wait in a collective",
    ]


def test_a_rank_that_the_others_wait_for_in_next_batch_is_named() -> None:
    waiting = process("rank 0", 1, thread(NEXT_BATCH))

    assert found(node(waiting, process("rank 1", 2, thread(LOSS, user_place=LOSS)))) == [
        f"rank 1 (pid 2) is in {LOSS}"
    ]


def test_ranks_that_all_compute_or_all_wait_for_a_batch_are_not_blamed() -> None:
    assert found(node(*(process(f"rank {r}", r, thread(LOSS)) for r in range(2)))) == []
    assert found(node(*(process(f"rank {r}", r, thread(NEXT_BATCH)) for r in range(2)))) == []


def test_a_process_that_answers_no_calls_is_named_with_its_place() -> None:
    calls: Calls = {
        "rollouts": {"calls": [], "tasks": [], "problem": "it did not answer within 3 s"}
    }

    assert found(node(process("rollouts", 5, thread("f (/a.py:1)")), calls=calls)) == [
        "rollouts (pid 5) does not answer: it is in f (/a.py:1)"
    ]


def test_a_process_that_serves_beside_its_main_thread_is_named_with_the_place_of_its_loop() -> None:
    calls: Calls = {"worker-0": {"calls": [], "tasks": [], "problem": "it did not answer in 3 s"}}
    threads = [thread(REWARD, user_place=REWARD), thread("g (/a.py:1)", "actor")]

    assert found(node(process("worker-0", 5, *threads), calls=calls)) == [
        "worker-0 (pid 5) does not answer: it is in g (/a.py:1)"
    ]


def test_a_node_that_does_not_answer_is_named() -> None:
    assert found(node(process("rank 0", 1), name="node-0"), node(name="node-1")) == [
        "node-1 does not answer"
    ]


def test_who_waits_on_whom_comes_last() -> None:
    state = JobState(
        job="x", time=0.0, phase="the ranks wait for next_batch", failure="", nodes=(), pools=()
    )
    stopped = process("policy-0", 12, why_stuck="stopped by a signal")

    assert verdicts([node(stopped)], state)[-1] == "the ranks wait for next_batch"
