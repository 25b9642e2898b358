"""A policy and a judge in turn: only one has its KV cache, and both generate the same as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm_runs import needs_vllm

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session

MAX_CONTEXT_LEN = 256
GPU_KV_CACHE_NUM_TOKENS = 1 << 24
GPU_KV_CACHE_NBYTES = 16 << 30

ModelFolder = Callable[[str], Path]


def start_pool(session: Session, name: str, model: Path, **settings: Any) -> None:
    turns: dict[str, Any] = {"mode": "standalone"}
    if name == "judge":
        turns = {"mode": "colocated", "shares_with": "policy", "max_wait_s": 0.1}
    kwargs = {"model_path": str(model), "max_context_len": MAX_CONTEXT_LEN, "tick_ms": 5.0}
    session.create_pool(
        PoolSpec(
            name=name,
            count=1,
            load_weights=True,
            engine=engine_target(settings.pop("engine")),
            kwargs=kwargs | settings,
            **turns,
        )
    )


def start_generator(session: Session, pool: str) -> SyncHandle:
    config = {"pool": pool, "max_context_len": MAX_CONTEXT_LEN, "shares_memory": True}
    return session.spawn(
        ActorSpec(
            name=f"{pool}-generator",
            target="umbra.runtime.rollout.dispatch.generator:GeneratorService",
            kwargs={"config": config},
        )
    )


def greedy(generator: SyncHandle) -> list[int]:
    prompt = np.asarray([5, 9, 2], np.int32)
    answer = generator.call("generate", prompt, 40, 0.0, timeout_s=120.0)
    tokens: list[int] = answer["tokens"].tolist()
    assert len(tokens) == 40
    return tokens


def kv_nbytes(session: Session, engine: str) -> int:
    return int(session.actor(engine).call("stats")["kv_nbytes"])


@pytest.mark.process
@pytest.mark.slow
def test_embedded_engines_in_turn(umbra_session: Session, model_folder: ModelFolder) -> None:
    start_pool(umbra_session, "judge", model_folder("llama"), engine="embedded")
    start_pool(umbra_session, "policy", model_folder("qwen3"), engine="embedded")
    judge, policy = (start_generator(umbra_session, name) for name in ("judge", "policy"))
    said: list[tuple[list[int], list[int]]] = []

    for _ in range(3):
        by_policy = greedy(policy)
        assert kv_nbytes(umbra_session, "judge-0") == 0 < kv_nbytes(umbra_session, "policy-0")
        by_judge = greedy(judge)
        assert kv_nbytes(umbra_session, "policy-0") == 0 < kv_nbytes(umbra_session, "judge-0")
        said.append((by_policy, by_judge))

    assert said[0] == said[1] == said[2]
    assert said[0][0] != said[0][1]


@needs_vllm
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
def test_vllm_engines_in_turn_on_one_gpu(umbra_session: Session, model_folder: ModelFolder) -> None:
    settings: dict[str, Any] = {
        "engine": "vllm",
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 16,
        "kv_cache_num_tokens": GPU_KV_CACHE_NUM_TOKENS,
        "engine_args": {"enforce_eager": True},
    }

    def free_nbytes() -> int:
        return torch.cuda.mem_get_info()[0]

    at_first = free_nbytes()
    start_pool(umbra_session, "judge", model_folder("qwen3-untied"), **settings)
    one_awake = at_first - free_nbytes()
    assert one_awake > GPU_KV_CACHE_NBYTES / 2
    start_pool(umbra_session, "policy", model_folder("qwen3"), **settings)
    judge, policy = (start_generator(umbra_session, name) for name in ("judge", "policy"))
    said: list[tuple[list[int], list[int]]] = []

    for _ in range(3):
        said.append((greedy(policy), greedy(judge)))
        # what a process keeps asleep is its CUDA context
        assert at_first - free_nbytes() < one_awake + GPU_KV_CACHE_NBYTES / 2

    assert said[0] == said[1] == said[2]
