"""vLLM and SGLang on two "nodes" of one host, with a GPU each, whose NCCL uses sockets."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conformance_runs import requests
from engine_runs import Collector, Completion
from gpu_suite import Reference
from model_factory import make_model
from process_runs import assert_ended
from sglang_runs import ENGINE_ARGS as SGLANG_ARGS
from sglang_runs import needs_sglang
from vllm_runs import needs_vllm
from watching import tree

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.cluster.placement import EngineGpus, FollowerPlace
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process import descendants
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.testing.factories import SessionFactory
from umbra.trainer.world.mesh import usable_gpus

GPUS = usable_gpus()[:2]  # here: the driver keeps descriptors of the question

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("default"),  # the engines' own
]

MODEL = "qwen3-wide"
REFERENCE = Reference(make=lambda seed: make_model(MODEL, seed).bfloat16().float(), atol=0.15)
START_LIMIT_S = 300.0
# Custom all-reduce is for the GPUs of one node, which these two would seem to be on.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "vllm": {
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "disable_custom_all_reduce": True,
    },
    "sglang": SGLANG_ARGS | {"tp_size": 2, "disable_custom_all_reduce": True},
}
VARIABLES = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0",  # as in `sglang_runs`
}


def pool_spec(engine: str, folder: Path) -> PoolSpec:
    own, other = GPUS
    return PoolSpec(
        name="policy",
        engine=engine,
        count=1,
        num_gpus=2,
        mode="standalone",
        kwargs={
            "model_path": str(folder),
            "dtype": "bfloat16",
            "device": "cuda",
            "max_context_len": 512,
            "max_num_seqs": 16,
            "kv_cache_num_tokens": 1 << 16,
            "tick_ms": 5.0,
            "engine_args": ENGINE_ARGS[engine],
        },
        env=VARIABLES,
        engine_gpus=(EngineGpus(own=(own,), others=(other,)),),
        engine_followers=((FollowerPlace(node=0, gpus=EngineGpus(own=(other,), others=(own,))),),),
        restart=RestartPolicy(backoff_initial_s=0.1),
        start_timeout_s=START_LIMIT_S,
        hung_limit_s=120.0,
    )


def wait_ready(session: Session, num_restarts: int) -> Any:
    """Waits until the engine runs after so many restarts; returns its address."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        (state,) = session.pool("policy").states()
        if (
            state["state"] in ("PENDING_WEIGHTS", "SERVING")
            and state["num_restarts"] == num_restarts
        ):
            return state["ref"]
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


def update(session: Session, version: int) -> None:
    weights = dict(make_model(MODEL, version).named_parameters())
    publisher = WeightPublisher(session, weights)
    with closing(publisher):
        report = publisher.publish("policy", version, 120.0)
    assert not report.failed, report


def generated(session: Session, ref: Any, asked: list[dict[str, Any]]) -> dict[int, Completion]:
    collector, engine = Collector(), session.connect(ref)
    engine.call("submit", asked, timeout_s=60.0)
    with closing(engine.stream("deltas", timeout_s=120.0)) as batches:
        for batch in batches:
            collector.apply(batch)
            if collector.num_finished() == len(asked):
                return collector.completions
    raise AssertionError("the stream ended")


def check_version(session: Session, ref: Any, version: int) -> None:
    asked = requests(4, max_new_tokens=24, temperature=0.0)
    completions = generated(session, ref, asked)
    for request in asked:
        errors = REFERENCE.errors(request, completions[request["id"]], version, 0.0)
        assert errors.max() < REFERENCE.atol, (version, errors)
    others = REFERENCE.errors(asked[0], completions[0], version + 1, 0.0)
    assert others.max() > 4 * REFERENCE.atol, "too much alike to tell"


@pytest.mark.parametrize(
    "engine",
    [pytest.param("vllm", marks=needs_vllm), pytest.param("sglang", marks=needs_sglang)],
)
def test_an_engine_on_two_nodes_gets_weights_and_its_parts_die_together(
    umbra_session_factory: SessionFactory, model_folder: Callable[[str], Path], engine: str
) -> None:
    session = umbra_session_factory(tcp_host="127.0.0.1")
    session.create_pool(pool_spec(engine, model_folder(MODEL)))
    ref = wait_ready(session, 0)
    for version in (1, 2):
        update(session, version)
        check_version(session, ref, version)

    pids = {str(a["name"]): int(a["pid"]) for a in session.supervisor_call("list_actors")}
    follower = tree(pids["policy-0.1"])
    (worker,) = descendants.working_child_pids(follower[1])  # of its program
    os.kill(worker, signal.SIGKILL)
    assert_ended([*follower, *tree(pids["policy-0"])], 60.0)

    ref = wait_ready(session, 1)
    update(session, 3)
    check_version(session, ref, 3)
