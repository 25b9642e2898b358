"""Engines on several GPUs: each has a CUDA context on its own ones only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from model_factory import make_model
from process_runs import greedy

from umbra.runtime.cluster.placement import EngineGpus
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.nvml import Nvml
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.trainer.world.mesh import usable_gpus

GPUS = usable_gpus()[:2]  # here: the driver keeps descriptors of the question

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(GPUS) < 2, reason="needs two CUDA devices"),
    pytest.mark.process,
    pytest.mark.slow,
]


def pids_by_gpu() -> list[set[int]]:
    """The processes with a context on each of the GPUs. In a container the pids may be the
    host's."""
    nvml = Nvml.open(gpus=GPUS)
    assert nvml is not None
    try:
        return [set(use.by_pid) for use in nvml.uses()]
    finally:
        nvml.close()


def test_engines_have_no_context_on_each_others_gpus_before_they_read_weights_there(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    before = pids_by_gpu()
    first, second = GPUS
    umbra_session.create_pool(
        PoolSpec(
            name="policy",
            engine="embedded",
            count=2,
            mode="standalone",
            kwargs={
                "model_path": str(model_folder("qwen3")),
                "device": "cuda",
                "dtype": "float32",
                "max_context_len": 512,
                "kv_cache_num_tokens": 1 << 14,
            },
            load_weights=True,
            engine_gpus=(
                EngineGpus(own=(first,), others=(second,)),
                EngineGpus(own=(second,), others=(first,)),
            ),
        )
    )

    tokens = [greedy(umbra_session.actor(name), 120.0) for name in ("policy-0", "policy-1")]
    now = pids_by_gpu()

    assert tokens[0] == tokens[1]
    new = [after - then for after, then in zip(now, before, strict=True)]
    if not any(new):
        pytest.skip("NVML lists no processes here")
    assert [len(pids) for pids in new] == [1, 1]
    assert new[0].isdisjoint(new[1])


def test_an_engine_reads_another_gpus_memory_without_a_context_there(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    first, second = GPUS
    weights = {
        name: parameter.detach().to("cuda:1")
        for name, parameter in make_model("qwen3").named_parameters()
    }
    pool = umbra_session.create_pool(
        PoolSpec(
            name="policy",
            engine="embedded",
            count=1,
            mode="standalone",
            transport="cuda_ipc",
            kwargs={
                "model_path": str(model_folder("qwen3")),
                "device": "cuda",
                "dtype": "float32",
                "max_context_len": 512,
                "kv_cache_num_tokens": 1 << 14,
            },
            engine_gpus=(EngineGpus(own=(first,), others=(second,)),),
        )
    )
    deadline = time.monotonic() + 60.0
    while pool.states()[0]["state"] != "PENDING_WEIGHTS":
        assert time.monotonic() < deadline, pool.states()
        time.sleep(0.1)
    before = pids_by_gpu()
    publisher = WeightPublisher(umbra_session, weights)

    for version in range(1, 4):  # the first one with checksums
        report = publisher.publish("policy", version, 60.0)
        assert (report.transport, report.failed) == ("cuda_ipc", {})

    now = pids_by_gpu()
    if not any(now):
        pytest.skip("NVML lists no processes here")
    assert now[1] == before[1]
