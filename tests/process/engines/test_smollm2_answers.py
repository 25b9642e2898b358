"""A real model answers in the engines, token by token, as it does in transformers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
import torch
from adapter_runs import SharedEngine
from conformance_runs import results_of
from engine_runs import (
    load_model,
    make_core,
    make_request,
    run_async,
    run_to_end,
    running,
    wire_request,
)
from smollm2 import needs_smollm2, smollm2_folder
from transformers import AutoModelForCausalLM
from vllm_runs import needs_vllm, running_core

from umbra.runtime.text.model_tokenizer import ModelTokenizer

pytestmark = [needs_smollm2, pytest.mark.slow, pytest.mark.process]

MODEL = smollm2_folder() / "model"
NUM_PROMPTS = 4
SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": [2]}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = ModelTokenizer.open(MODEL)
    with (smollm2_folder() / "sums/eval.jsonl").open() as lines:
        chats = [json.loads(line)["messages"] for line in islice(lines, NUM_PROMPTS)]
    return [tokenizer.encode(tokenizer.render_chat(chat, {})) for chat in chats]


@pytest.fixture(scope="module")
def answers(prompts: list[list[int]]) -> list[list[int]]:
    """Of transformers, with the end token."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(MODEL, dtype=torch.float32)
    limit = SETTINGS["max_new_tokens"]
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def test_the_embedded_engine_answers_as_transformers(
    prompts: list[list[int]], answers: list[list[int]]
) -> None:
    asked = [make_request(idx, prompt, **SETTINGS) for idx, prompt in enumerate(prompts)]

    results = run_to_end(make_core(load_model(MODEL)), asked)

    assert [results[idx].tokens for idx in range(NUM_PROMPTS)] == answers
    assert any(results[idx].reason == "stop" for idx in range(NUM_PROMPTS))


@needs_vllm
@pytest.mark.filterwarnings("default")  # vLLM's own
@pytest.mark.umbra_allow_leaks("vLLM's frontend keeps threads and sockets until its process ends")
def test_vllm_answers_as_transformers(prompts: list[list[int]], answers: list[list[int]]) -> None:
    asked = [wire_request(idx, prompt, **SETTINGS) for idx, prompt in enumerate(prompts)]
    with running_core(MODEL, max_context_len=256, max_num_seqs=NUM_PROMPTS) as core:

        async def body() -> None:
            engine = SharedEngine(
                core,
                None,
                has_weights=True,
                max_context_len=256,
                max_num_seqs=NUM_PROMPTS,
                tick_ms=2.0,
            )
            async with running(engine):
                results = await results_of(engine, asked)
            assert [results[idx].tokens for idx in range(NUM_PROMPTS)] == answers

        run_async(body)
