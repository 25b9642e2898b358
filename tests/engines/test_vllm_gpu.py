"""vLLM on a GPU: the conformance suite, memory that sleep gives back, output of updated weights."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_runs import SharedEngine, weight_image
from conformance_suite import *  # noqa: F403 - the tests
from conformance_suite import MakeEngine, requests, results_of, weights
from engine_runs import Engine, run_async, running
from local_sync import publish
from model_factory import make_model
from vllm_runs import MAX_CONTEXT_LEN, needs_vllm, running_core

from umbra.engines.vllm.core import VllmCore

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

KV_CACHE_NUM_TOKENS = 1 << 22
"""2 GiB: what sleep frees is then far above what else changes on the device."""


@pytest.fixture(scope="module")
def vllm_core(model_folder: Callable[[str], Path]) -> Generator[VllmCore]:
    with running_core(
        model_folder("qwen3"),
        device="cuda",
        kv_cache_num_tokens=KV_CACHE_NUM_TOKENS,
        max_num_seqs=256,
        engine_args={"enforce_eager": True},
    ) as core:
        yield core


@pytest.fixture(scope="module")
def first_image() -> Generator[dict[str, Any]]:
    with weight_image(weights()) as image:
        yield image


@pytest.fixture(scope="session")
def resumes_draws() -> bool:
    return False


@pytest.fixture(scope="session")
def frees_memory_asleep() -> bool:
    return True


@pytest.fixture(params=["vllm"])
def make_engine(vllm_core: VllmCore, first_image: dict[str, Any]) -> MakeEngine:
    def make(*, load_weights: bool = True, **settings: Any) -> Engine:
        given: dict[str, Any] = {
            "max_context_len": MAX_CONTEXT_LEN,
            "max_num_seqs": 256,
            "tick_ms": 2.0,
        }
        image = first_image if load_weights else None
        return SharedEngine(vllm_core, image, **(given | settings))

    return make


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_transformers(make_engine: MakeEngine, temperature: float) -> None:
    model = make_model("qwen3")

    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            asked = requests(6, max_new_tokens=40, temperature=temperature)
            results = await results_of(engine, asked)

        for request in asked:
            prompt, completion = request["tokens"].tolist(), results[request["id"]]
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + completion.tokens])).logits[0]
            expected = torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), -1)
            chosen = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            # attention in TF32
            assert torch.tensor(completion.logprobs).allclose(chosen, atol=1e-2)

    run_async(body)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_device_memory_back(
    make_engine: MakeEngine, tmp_path: Path, level: Any
) -> None:
    def free_nbytes() -> int:
        return torch.cuda.mem_get_info()[0]

    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            asked = requests(8, temperature=0.0)
            before = await results_of(engine, asked)
            stats, free_awake = await engine.stats(), free_nbytes()
            await engine.pause("abort")

            await engine.sleep(level)

            freed = free_nbytes() - free_awake
            print(
                f"level {level}: freed {freed / 2**20:.0f} MiB of {stats['kv_nbytes'] / 2**20:.0f}"
            )
            assert freed >= 0.95 * (stats["kv_nbytes"] + stats["weights_nbytes"])
            await engine.wake(["weights", "kv_cache"])
            if level == 2:
                await publish(engine, weights(), 1, tmp_path)
            else:
                await engine.resume()
            after = await results_of(engine, asked)
        for i in range(8):
            assert after[i].tokens == before[i].tokens

    run_async(body)


def test_256_requests_at_once_come_back_whole(make_engine: MakeEngine) -> None:
    async def body() -> None:
        engine = make_engine()
        async with running(engine):
            results = await results_of(engine, requests(256, max_new_tokens=100))
        assert all(len(results[i].tokens) == 100 for i in range(256))

    run_async(body)
