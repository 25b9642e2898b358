"""The embedded engine on a CUDA device: the same numbers, exact resumption, memory given back."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import (
    Collector,
    collect,
    forced_logprobs,
    load_model,
    make_core,
    make_request,
    on_the_engines_loop,
    run_to_end,
    running,
    take,
    wire_request,
)
from local_sync import publish
from model_factory import KINDS, make_model

from umbra.engines.embedded.embedded_engine import EmbeddedEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB_SIZE = 97


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_gives_the_logprobs_of_transformers_on_the_cpu(
    model_folder: Callable[[str], Path], kind: str, dtype: str
) -> None:
    reference = make_model(kind).to(getattr(torch, dtype))
    sequences = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 100)).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor(sequences)).logits, -1)

    found = forced_logprobs(load_model(model_folder(kind), dtype, device="cuda"), sequences, 70)

    # Norms and angles are float32 in transformers too: another device rounds them differently.
    torch.testing.assert_close(found, expected[:, 69:], rtol=0, atol=5e-5)


def test_interrupted_on_cuda_goes_on_token_for_token(
    model_folder: Callable[[str], Path],
) -> None:
    rng = np.random.default_rng(0)
    model = load_model(model_folder("qwen3"), "float64", device="cuda")
    requests = [
        make_request(i, rng.integers(0, VOCAB_SIZE, 20).tolist(), max_new_tokens=80)
        for i in range(12)
    ]
    whole = run_to_end(make_core(model), requests)
    core, part = make_core(model, kv_cache_num_tokens=512), Collector()
    core.add(requests)
    for _ in range(25):
        core.step()
    core.abort()
    take(core, part)
    rests = [
        request.resumed(np.append(request.tokens, np.array(part[request.id].tokens, np.int32)))
        for request in requests
        if part[request.id].reason == "abort"
    ]

    again = run_to_end(make_core(model, max_num_seqs=5), rests)

    for request in requests:
        assert part[request.id].tokens + again[request.id].tokens == whole[request.id].tokens


@pytest.mark.parametrize("level", [1, 2])
@on_the_engines_loop
async def test_sleep_gives_device_memory_back(
    model_folder: Callable[[str], Path], tmp_path: Path, level: Any
) -> None:
    def free_nbytes() -> int:
        return torch.cuda.mem_get_info()[0]

    torch.cuda.empty_cache()  # else the engine may lie within what other tests had

    engine = EmbeddedEngine(
        model_path=str(model_folder("qwen3")),
        device="cuda",
        dtype="bfloat16",
        max_context_len=512,
        max_num_seqs=512,
        kv_cache_num_tokens=1 << 20,
        load_weights=True,
    )
    async with running(engine):
        wanted = [wire_request(i, [i] * 40, temperature=0.0) for i in range(8)]
        await engine.submit(wanted)
        before = Collector()
        await collect(engine, before, 8)
        stats, free_awake = await engine.stats(), free_nbytes()
        await engine.pause("abort")

        await engine.sleep(level)

        freed = free_nbytes() - free_awake
        assert stats["kv_nbytes"] >= 1 << 28
        assert freed >= 0.9 * stats["kv_nbytes"]
        await engine.wake(["kv_cache", "weights"])
        if level == 2:
            model = make_model("qwen3").bfloat16()
            await publish(engine, dict(model.named_parameters()), 1, tmp_path)
        else:
            await engine.resume()
        await engine.submit(wanted)
        after = Collector()
        await collect(engine, after, 8)
        for i in range(8):
            assert after[i].tokens == before[i].tokens
