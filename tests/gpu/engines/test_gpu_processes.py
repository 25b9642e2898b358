"""vLLM and SGLang on GPUs where they live: in an actor's process, with processes below it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from process_runs import actor_of, assert_ended, greedy, tree_of
from sglang_runs import ENGINE_ARGS as SGLANG_ARGS
from sglang_runs import needs_sglang
from vllm_runs import needs_vllm

from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.errors import ActorDied
from umbra.runtime.session.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the engines' own
    pytest.mark.slow,
    pytest.mark.process,
]

START_TIMEOUT_S = 300.0
KV_CACHE_NUM_TOKENS = 1 << 21  # 4 GiB
SLACK_NBYTES = 1 << 30
MEMORY_LIMIT_S = 30.0
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "vllm": {"enforce_eager": True},
    "sglang": SGLANG_ARGS,
}
WORKERS = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

on_engines = pytest.mark.parametrize(
    "engine",
    [pytest.param("vllm", marks=needs_vllm), pytest.param("sglang", marks=needs_sglang)],
)


def spec(engine: str, folder: Path, num_workers: int) -> ActorSpec:
    return ActorSpec(
        name=engine,
        target=engine_target(engine),
        kwargs={
            "model_path": str(folder),
            "dtype": "bfloat16",
            "device": "cuda",
            "max_context_len": 512,
            "max_num_seqs": 16,
            "kv_cache_num_tokens": KV_CACHE_NUM_TOKENS,
            "load_weights": True,
            "engine_args": ENGINE_ARGS[engine] | {WORKERS[engine]: num_workers},
        },
        role="engine",
        essential=False,
        restart=RestartPolicy(mode="on_failure", max_restarts=1),
        start_timeout_s=START_TIMEOUT_S,
    )


def free_nbytes() -> list[int]:
    """Free memory of each device."""
    return [torch.cuda.mem_get_info(idx)[0] for idx in range(torch.cuda.device_count())]


@pytest.fixture(scope="session")
def free_at_first() -> list[int]:
    """Before any test: descriptors that come with the first look are not what a test left."""
    return free_nbytes()


def last_worker(tree: Sequence[int]) -> int:
    """The process that computes, of several the last one; it is known by the title it has."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tree[1:]}
    names = (b"EngineCore", b"Worker", b"scheduler")
    return max(pid for pid, title in titles.items() if any(name in title for name in names))


def wait_for_memory(expected: Sequence[int]) -> None:
    deadline = time.monotonic() + MEMORY_LIMIT_S
    while any(now < then - SLACK_NBYTES for now, then in zip(free_nbytes(), expected, strict=True)):
        assert time.monotonic() < deadline, f"{free_nbytes()} are free, {expected} were"
        time.sleep(0.1)


@on_engines
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=needs_two_gpus)])
def test_killed_it_leaves_no_process_and_no_memory_and_the_next_one_serves(
    umbra_session: Session,
    model_folder: Callable[[str], Path],
    free_at_first: list[int],
    engine: str,
    num_workers: int,
) -> None:
    resolve = partial(
        umbra_session.supervisor_call,
        "resolve",
        engine,
        START_TIMEOUT_S,
        timeout_s=START_TIMEOUT_S + 1.0,
    )
    handle = umbra_session.spawn(spec(engine, model_folder("qwen3-wide"), num_workers))
    before = greedy(handle, timeout_s=120.0)
    free_alive = free_nbytes()
    assert any(
        now < then - SLACK_NBYTES for now, then in zip(free_alive, free_at_first, strict=True)
    )
    tree = tree_of(actor_of(umbra_session, engine)["pid"])

    os.kill(tree[0], signal.SIGKILL)

    handle = umbra_session.connect(resolve(handle.ref.incarnation))
    assert all(not Path(f"/proc/{pid}").exists() for pid in tree)
    assert greedy(handle, timeout_s=120.0) == before
    wait_for_memory(free_alive)  # beside the new one there is nothing of the old one

    tree = tree_of(actor_of(umbra_session, engine)["pid"])
    os.kill(last_worker(tree), signal.SIGKILL)

    with pytest.raises(ActorDied):
        resolve(handle.ref.incarnation)
    assert_ended(tree, timeout_s=60.0)
    wait_for_memory(free_at_first)
