"""vLLM on a GPU with LoRA adapters: as a judge has them, in bfloat16, over sleep at level 1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapter_factory import save_adapter
from engine_runs import running
from local_sync import publish
from lora_runs import check_each
from model_factory import make_model
from vllm_runs import needs_vllm

from umbra.engines.vllm.vllm_engine import VllmEngine
from umbra.engines.vllm.vllm_library import VllmLibrary
from umbra.runtime.errors import ConfigError

pytestmark = [
    needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.umbra_allow_leaks(
        "vLLM's frontend keeps threads and sockets until its process ends"
    ),
]
KIND = "qwen3-wide-512"
"""vLLM 0.26.0 cannot start with adapters for fewer than 256 tokens."""
TOLERANCE = 0.5
"""In bfloat16 single logprobs are off by 0.1; another adapter makes 3 of it."""


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    attention = ("q_proj", "o_proj")
    return {
        "all": save_adapter(folder / "all", KIND, seed=1, rank=8),
        "some": save_adapter(folder / "some", KIND, seed=2, rank=16, targets=attention),
    }


def make_engine(model: Path, adapters: dict[str, Path], *, load_weights: bool) -> VllmEngine:
    return VllmEngine(
        model_path=str(model),
        max_context_len=512,
        max_num_seqs=16,
        kv_cache_num_tokens=1 << 14,
        tick_ms=2.0,
        load_weights=load_weights,
        engine_args={"enforce_eager": True},
        lora_adapters={name: str(path) for name, path in adapters.items()},
    )


def test_adapters_are_their_own_and_outlive_a_nap(
    model_folder: Callable[[str], Path], adapters: dict[str, Path]
) -> None:
    async def body() -> None:
        engine = make_engine(model_folder(KIND), adapters, load_weights=True)
        async with running(engine):
            await check_each(engine, KIND, 0, adapters, TOLERANCE)
            await engine.pause("abort")
            await engine.sleep(1)
            await engine.wake(["weights"])
            await engine.wake(["kv_cache"])
            await engine.resume()
            await check_each(engine, KIND, 0, adapters, TOLERANCE)

    asyncio.run(body())


def test_new_weights_come_beneath_adapters_or_the_start_is_refused(
    model_folder: Callable[[str], Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    async def body() -> None:
        engine = make_engine(model_folder(KIND), adapters, load_weights=False)
        if not VllmLibrary.load().can_update_beneath_adapters():
            with pytest.raises(ConfigError, match="cannot take new weights beneath LoRA adapters"):
                await engine.__aenter__()
            return
        async with running(engine):
            for version in (1, 2):
                if version > 1:
                    await engine.pause("abort")
                    await engine.sleep(2)
                    await engine.wake(["weights", "kv_cache"])
                weights = dict(make_model(KIND, version).named_parameters())
                await publish(engine, weights, version, tmp_path)
                await check_each(engine, KIND, version, adapters, TOLERANCE)

    asyncio.run(body())
