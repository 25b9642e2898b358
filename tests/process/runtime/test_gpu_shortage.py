"""Engines that lack GPU memory: recognised, explained, and not restarted forever."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_specs import actor
from pools_in_turn import spec, wait_until

from umbra.runtime.cluster.gpu_shortage import (
    GpuShortages,
    describe_gpu_memory,
    lacks_gpu_memory,
)
from umbra.runtime.errors import JobFailed
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.nvml import GpuUse
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.testing.factories import SessionFactory

GIB = 1 << 30


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.15 GiB. GPU 0 has a total",
        "torch.AcceleratorError: CUDA error: out of memory",
        "Exception: Call to wake_up method failed: CUDA Error: out of memory at "
        "/workspace/csrc/cumem_allocator.cpp:163",
        "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "ValueError: Free memory on device cuda:0 (12.2/23.6 GiB) on startup is less than desired "
        "GPU memory utilization (0.92, 21.7 GiB).",
        "ValueError: No available memory for the cache blocks. Try increasing",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ],
)
def test_errors_of_engines_about_too_little_memory_are_recognised(text: str) -> None:
    assert lacks_gpu_memory(f"policy-0#1 failed at wake: {text}\nmore")


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "its process ended without a report: it was killed (out of memory?) or crashed",
        "[torch_memory_saver.cpp] CUresult error: 1 (invalid argument)",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 9 bytes",
    ],
)
def test_other_failures_are_not_taken_for_it(text: str) -> None:
    assert not lacks_gpu_memory(text)


def test_the_report_names_holders_of_memory_and_settings_to_change() -> None:
    use = GpuUse(
        total_nbytes=140 * GIB,
        used_nbytes=139 * GIB,
        by_pid={10: 93 * GIB, 20: 16 * GIB, 21: 29 * GIB, 99: GIB // 2},
    )
    holders = {10: "rank 0 (pid 10)", 20: "policy-0 (pid 20)", 21: "policy-0 (pid 20)"}

    text = describe_gpu_memory([use], holders)

    assert text.startswith(
        "GPU 0: rank 0 (pid 10) holds 93.0 GiB, policy-0 (pid 20) holds 45.0 GiB, unknown "
        "processes and the driver hold 1.0 GiB, 1.0 GiB of 140.0 GiB are free. "
    )
    assert "pool.kv_cache_num_tokens" in text
    assert "train.offload" in text


def test_in_a_container_that_hides_pids_all_holders_are_unknown() -> None:
    use = GpuUse(total_nbytes=140 * GIB, used_nbytes=139 * GIB, by_pid={4001: 138 * GIB})

    text = describe_gpu_memory([use], {10: "judge-0 (pid 10)"})

    assert text.startswith("GPU 0: unknown processes and the driver hold 139.0 GiB, 1.0 GiB of")
    assert "train.offload" not in text  # nothing trains


def is_final_after(*events: str) -> bool:
    """Engines in small letters fail for lack of memory; `crash` at neither start nor wake."""

    async def describe() -> str:
        return "GPU 0: full."

    async def follow() -> bool:
        shortages = GpuShortages(describe)
        for event in events:
            match event:
                case "START":
                    shortages.started()
                case "WAKE":
                    shortages.woke()
                case "wake":
                    await shortages.failed_to_wake()
                    found = await shortages.explain_end("CUDA out of memory", is_start=False)
                    assert found.endswith("GPU 0: full.")
                case "start":
                    found = await shortages.explain_end("CUDA out of memory", is_start=True)
                    assert found.endswith("GPU 0: full.")
                case _:  # at work
                    assert not await shortages.explain_end("CUDA out of memory", is_start=False)
        return shortages.is_final

    return asyncio.run(follow())


def test_the_second_failure_in_a_row_is_final() -> None:
    assert is_final_after("START", "wake", "START", "wake")
    assert is_final_after("START", "WAKE", "wake", "start")
    assert is_final_after("START", "start", "start")
    assert is_final_after("START", "wake", "START", "crash", "START", "wake")

    assert not is_final_after("START", "wake")
    assert not is_final_after("START", "wake", "START", "WAKE", "wake")
    assert not is_final_after("START", "start", "START", "start")
    assert not is_final_after("START", "crash", "START", "crash")


def short_pool(**kwargs: Any) -> PoolSpec:
    return replace(
        spec("policy", mode="hybrid", load_weights=False, kwargs=kwargs),
        engine="short_engine:ShortEngine",
        env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )


def train_steps(session: Session, num_steps: int) -> None:
    """Acts like a trainer in hybrid mode: a sync wakes the engine; it serves, and sleeps."""
    pool = session.pool("policy")
    for version in range(1, num_steps + 1):
        publish(session, version)
        while pool.states()[0]["state"] != "SERVING":  # it failed, and another is being started
            wait_until(lambda: pool.states()[0]["state"] == "PENDING_WEIGHTS")
            publish(session, version)
        pool.sleep(2)


def publish(session: Session, version: int) -> None:
    weights = {"w": torch.zeros(10)}
    with closing(WeightPublisher(session, weights)) as publisher:
        publisher.publish("policy", version, 20.0)


@pytest.mark.process
@pytest.mark.slow
def test_an_engine_that_fails_to_load_after_it_has_woken_is_not_short_of_memory_to_wake(
    umbra_session: Session, umbra_session_factory: SessionFactory
) -> None:
    umbra_session.create_pool(short_pool(at_load=[1, 2]))

    train_steps(umbra_session, 4)

    assert umbra_session.pool("policy").states()[0]["incarnation"] == 3
    assert not any("too little GPU memory" in note for note in umbra_session_factory.notes)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"at_wake": [1, 2]},
            ["policy-0#2 has too little GPU memory to wake, as the last time", "cumem_allocator"],
        ),
        (
            {"at_wake": [1, 2], "exits": True},
            [
                "policy-0#2 has too little GPU memory to wake, as the last time",
                "torch_memory_saver",
            ],
        ),
        (
            {"at_wake": [1], "at_start": [2]},
            ["policy-0#2 has too little GPU memory to start, as the last time", "failed to start"],
        ),
    ],
    ids=["wake raises", "wake ends it", "then the start"],
)
def test_the_same_engine_short_of_memory_twice_in_a_row_ends_the_job(
    umbra_session_factory: SessionFactory, kwargs: dict[str, Any], words: list[str]
) -> None:
    session = umbra_session_factory()
    session.create_pool(short_pool(**kwargs))

    with pytest.raises(JobFailed) as failed:
        train_steps(session, 10)

    message = str(failed.value)
    for word in (*words, "a restart does not cure that", "train.offload"):
        assert word in message, message
    (note,) = [note for note in umbra_session_factory.notes if "restarting it" in note]
    assert note.startswith("policy-0#1 has too little GPU memory to wake. ")


@pytest.mark.process
@pytest.mark.slow
def test_an_engine_that_wakes_after_its_restart_may_lack_memory_again(
    umbra_session_factory: SessionFactory,
) -> None:
    session = umbra_session_factory()
    session.create_pool(short_pool(at_wake=[1]))

    train_steps(session, 3)

    assert session.pool("policy").states()[0]["incarnation"] == 2


@pytest.mark.process
@pytest.mark.slow
def test_an_engine_that_dies_while_the_trainer_has_the_memory_starts_after_that(
    umbra_session: Session,
) -> None:
    pool = umbra_session.create_pool(short_pool())
    train_steps(umbra_session, 1)
    (engine,) = umbra_session.supervisor_call("list_actors")

    os.kill(engine["pid"], signal.SIGKILL)
    wait_until(lambda: pool.states()[0]["state"] == "DEAD")
    umbra_session.spawn(actor("Echo"))  # which takes longer than the restart would

    assert pool.states()[0]["incarnation"] == 1
    publish(umbra_session, 2)
    wait_until(lambda: pool.states()[0]["state"] == "PENDING_WEIGHTS")
    assert pool.states()[0]["incarnation"] == 2
