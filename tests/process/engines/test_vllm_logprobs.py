"""Each token keeps its own logprob while vLLM lacks memory, and requests end at any moment."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import comparing_scheduler
import numpy as np
import pytest
import torch
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_runs import VOCAB_SIZE, MakeEngine
from engine_runs import Collector, run_async, running, wire_request
from local_sync import publish
from model_factory import make_model
from vllm_runs import needs_vllm, running_core

from umbra.engines.vllm import vllm_settings
from umbra.engines.vllm.vllm_engine import VllmCore

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
KV_CACHE_NUM_TOKENS = 1024
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, NUM_REQUESTS = 100, 200, 24
# A request grows from one block of 128 tokens to three, and the cache has eight.
KINDS: list[dict[str, Any]] = [
    {"max_new_tokens": NUM_NEW_TOKENS},
    {"max_new_tokens": NUM_NEW_TOKENS, "stop_token_ids": [0, 1, 2]},
    {"max_new_tokens": NUM_NEW_TOKENS},  # aborted
    {"max_new_tokens": 50, "forced": np.arange(50, dtype=np.int32)},
]


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preempted") / "yes"


@pytest.fixture(scope="module", params=["vllm"])
def core(model_folder: Callable[[str], Path], preempted: Path) -> Generator[VllmCore]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(comparing_scheduler.PREEMPTED, str(preempted))
        patched.setattr(vllm_settings, "SCHEDULER", comparing_scheduler.SCHEDULER)
        with running_core(
            model_folder("qwen3"), kv_cache_num_tokens=KV_CACHE_NUM_TOKENS
        ) as running_vllm:
            yield running_vllm


def test_each_token_has_its_own_logprob_through_preemption_aborts_pauses_and_updates(
    make_engine: MakeEngine, tmp_path: Path, preempted: Path
) -> None:
    draw = random.Random(0)
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = rng.integers(
        0, VOCAB_SIZE, (2 * NUM_REQUESTS, NUM_PROMPT_TOKENS)
    ).tolist()
    asked = [wire_request(i, prompt, **KINDS[i % 4]) for i, prompt in enumerate(prompts)]
    models = [make_model("qwen3"), make_model("qwen3", 1)]
    collector = Collector()

    async def run_some(first: int) -> None:
        """The requests from `first` on; freezes all of them now and then."""
        async with aclosing(engine.deltas()) as batches:
            await engine.submit(asked[first : first + NUM_REQUESTS])
            async for batch in batches:
                collector.apply(batch)
                if collector.num_finished() == first + NUM_REQUESTS:
                    return
                started = [i for i, c in collector.completions.items() if c.reason is None]
                if chosen := [i for i in started if i % 4 == 2 and draw.random() < 0.1]:
                    await engine.abort(chosen)
                if draw.random() < 0.1:
                    await engine.pause("keep")
                    await engine.resume()

    async def body() -> None:
        async with running(engine):
            await run_some(0)
            await engine.pause("keep")
            await publish(engine, dict(models[1].named_parameters()), 1, tmp_path)
            await run_some(NUM_REQUESTS)

    engine = make_engine(tick_ms=5.0)
    run_async(body)

    assert preempted.exists()
    reasons = {collector[request["id"]].reason for request in asked}
    assert reasons == {"abort", "stop", "length"}
    for request in asked:
        completion = collector[request["id"]]
        prompt, tokens = request["tokens"].tolist(), completion.tokens
        assert len(completion.logprobs) == len(tokens)
        version = request["id"] // NUM_REQUESTS
        assert set(completion.versions) == {version}
        with torch.inference_mode():
            logits = models[version](torch.tensor([prompt + tokens])).logits[0]
        expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.tensor(completion.logprobs).allclose(chosen, atol=1e-4)
