"""A pool of vLLM on the CPU whose syncs bring a LoRA adapter: restarts, sleep, two workers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from adapter_factory import read_adapter, save_adapter
from engine_runs import Completion
from lora_runs import TOLERANCE, asked_of_each, logprob_error
from process_runs import actor_of, completion_of
from test_vllm_process import NEVER, START_TIMEOUT_S, vllm_spec
from vllm_runs import needs_vllm

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.errors import UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.weights.shards import wire_manifest

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own, of modules before this one
]
KIND = "qwen3"


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [save_adapter(folder / str(rank), KIND, seed=rank, rank=rank) for rank in (4, 6)]


def pool_spec(folder: Path, lora_rank: int, **settings: Any) -> PoolSpec:
    return PoolSpec(
        name="policy",
        engine="vllm",
        count=1,
        lora_rank=lora_rank,
        kwargs={
            "model_path": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "max_context_len": 512,
            "max_num_seqs": 4,
            **settings,
        },
        restart=RestartPolicy(mode="on_failure", max_restarts=1, backoff_initial_s=0.1),
        start_timeout_s=2 * START_TIMEOUT_S,
    )


def policy_engine(session: Session, incarnation: int = 1) -> SyncHandle:
    """The engine of the pool, once it runs for so many times."""
    limit_s = 2 * START_TIMEOUT_S
    resolve = ("resolve", "policy-0", limit_s, incarnation - 1)
    return session.connect(session.supervisor_call(*resolve, timeout_s=limit_s + 1.0))


def test_a_restarted_engine_of_a_pool_gets_the_adapter_which_is_exactly_that_of_a_folder(
    umbra_session: Session,
    model_folder: Callable[[str], Path],
    adapters: list[Path],
) -> None:
    tensors, lora = read_adapter(adapters[0])
    pool = umbra_session.create_pool(pool_spec(model_folder(KIND), lora.rank))
    (request,) = asked_of_each([""], 1)
    found: list[Completion] = []
    manifest = wire_manifest(tensors, lora=lora)
    with closing(WeightPublisher(umbra_session, tensors, manifest)) as publisher:
        for incarnation in (1, 2):
            engine = policy_engine(umbra_session, incarnation)
            publisher.publish("policy", 1, 60.0)
            found.append(completion_of(engine, request))
            if incarnation == 1:
                os.kill(actor_of(umbra_session, "policy-0")["pid"], signal.SIGKILL)
    with pytest.raises(UmbraError, match="level 2 would lose the weights"):
        pool.sleep(2)
    folders = {"all": str(adapters[0])}
    other = umbra_session.spawn(
        vllm_spec(model_folder(KIND), NEVER, max_num_seqs=4, lora_adapters=folders)
    )
    of_the_folder = completion_of(other, request | {"lora": "all"})

    assert logprob_error(KIND, 0, adapters[0], request, found[0]) < TOLERANCE
    for of_a_sync in found:
        assert (of_a_sync.tokens, of_a_sync.logprobs) == (
            of_the_folder.tokens,
            of_the_folder.logprobs,
        )
        assert set(of_a_sync.versions) == {1}


def test_two_workers_have_their_slices_of_each_version(
    umbra_session: Session,
    model_folder: Callable[[str], Path],
    adapters: list[Path],
) -> None:
    two_workers = {"tensor_parallel_size": 2}
    umbra_session.create_pool(pool_spec(model_folder(KIND), 6, engine_args=two_workers))
    engine = policy_engine(umbra_session)
    (request,) = asked_of_each([""], 1)
    for version, adapter in enumerate(adapters, start=1):
        tensors, lora = read_adapter(adapter)
        manifest = wire_manifest(tensors, lora=lora)
        with closing(WeightPublisher(umbra_session, tensors, manifest)) as publisher:
            publisher.publish("policy", version, 60.0)

        found = completion_of(engine, request)

        assert set(found.versions) == {version}
        assert logprob_error(KIND, 0, adapter, request, found) < TOLERANCE
