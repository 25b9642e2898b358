"""Weights from a rank to vLLM in FP8 on the same GPU, by CUDA IPC.

vLLM reads a checkpoint when it starts. After syncs of other seeds and then of the same one, it must
generate exactly as it did before the first.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from adapter_runs import SharedEngine
from conformance_runs import requests, results_of
from engine_runs import Completion, Engine, run_async, running
from fp8_factory import KIND, Scheme, save_checkpoint
from gpu_suite import Reference
from ipc_pool import EngineInPool, pool_of, rank_processes
from model_factory import make_model
from vllm_runs import needs_vllm, running_core

from umbra.engines.shell import adapter_engine
from umbra.engines.vllm.vllm_engine import VllmCore
from umbra.runtime.pools.sync_coordinator import SyncCoordinator

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
SEEDS: Final = (1, 2, 3)
FIRST_SEED: Final = 3
"""vLLM starts with these weights."""
OTHER_SEED: Final = 4
ASKED: Final = requests(4, max_new_tokens=24, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    core: VllmCore
    folders: Mapping[int, Path]
    """Checkpoints, by their seeds."""

    def make_engine(self, *, has_weights: bool = False) -> SharedEngine:
        """Serves with the weights that the core has, or waits for an update."""
        settings: dict[str, Any] = {"max_num_seqs": 64, "max_context_len": 512, "tick_ms": 2.0}
        return SharedEngine(self.core, None, has_weights=has_weights, **settings)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("blocks", None), id="codes_in_blocks"),
        pytest.param(("none", "fp8"), id="quantised_on_arrival"),
        pytest.param(("tensors", None), id="codes_per_tensor"),
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Served]:
    scheme: Scheme
    scheme, quantization = request.param
    folder = tmp_path_factory.mktemp(scheme)
    folders = {seed: save_checkpoint(folder / str(seed), scheme, seed) for seed in SEEDS}
    with pytest.MonkeyPatch.context() as patch:
        # Its kernels are compiled when they are first called, for which a host may lack nvcc.
        patch.setenv("VLLM_USE_DEEP_GEMM", "0")
        with running_core(
            folders[FIRST_SEED],
            device="cuda",
            dtype="bfloat16",
            kv_cache_num_tokens=1 << 14,
            engine_args={"enforce_eager": True, "quantization": quantization},
        ) as core:
            yield Served(core=core, folders=folders)


def test_syncs_in_fp8_generate_exactly_as_checkpoints(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first four syncs have checksums. The last one follows a sleep that loses the weights."""
    caplog.set_level(logging.DEBUG, logger=adapter_engine.__name__)
    found: list[list[Completion]] = []

    async def publish(engine: SharedEngine, coordinator: SyncCoordinator, seed: int) -> None:
        rank.call("read", str(served.folders[seed]))
        report = await rank.publish(coordinator, len(found) + 1)
        await coordinator.wait_settled()
        print(f"seed {seed}: {report}, {caplog.messages[-1:]}")
        assert report["transport"] == "cuda_ipc"
        assert not report["failed"]
        found.append(await completions(engine))

    async def body() -> None:
        engine = served.make_engine(has_weights=True)
        async with running(engine):
            expected = await completions(engine)
            assert exactly(await completions(engine)) == exactly(expected), "not repeatable"
        engine = served.make_engine()
        in_pool = EngineInPool(engine)
        async with running(engine):
            async with pool_of(in_pool, tmp_path, transport="cuda_ipc") as coordinator:
                for seed in SEEDS:
                    await publish(engine, coordinator, seed)
            settings: dict[str, Any] = {"transport": "cuda_ipc", "verify_every": 16}
            async with pool_of(in_pool, tmp_path, **settings) as coordinator:
                for seed in SEEDS:
                    if seed == SEEDS[-1]:
                        await in_pool.pause("abort", 10.0)
                        await engine.sleep(2)
                        await engine.wake(["weights", "kv_cache"])
                    await publish(engine, coordinator, seed)

        for seed, completion in zip(SEEDS, found[: len(SEEDS)], strict=True):
            own, other = mean_error(completion, seed), mean_error(completion, OTHER_SEED)
            print(f"seed {seed}: mean error {own:.3f}, {other:.3f} from another model")
            assert 4 * own < other
        assert exactly(found[SEEDS.index(FIRST_SEED)]) == exactly(expected)
        for earlier, later in zip(found[: len(SEEDS)], found[len(SEEDS) :], strict=True):
            assert exactly(later) == exactly(earlier)

    with rank_processes(tmp_path) as (rank,):
        run_async(body)


async def completions(engine: Engine) -> list[Completion]:
    """One after the other: equal weights give equal logprobs only in equal batches."""
    return [(await results_of(engine, [each]))[each["id"]] for each in ASKED]


def exactly(found: list[Completion]) -> list[tuple[list[int], list[float]]]:
    return [(each.tokens, each.logprobs) for each in found]


def mean_error(found: list[Completion], seed: int) -> float:
    """Of logprobs, from those of the model before it is quantised."""
    reference = Reference(make=lambda seed: make_model(KIND, seed), atol=0.0)
    errors = [
        reference.errors(asked, completion, seed, 0.0)
        for asked, completion in zip(ASKED, found, strict=True)
    ]
    return float(torch.cat(errors).mean())
