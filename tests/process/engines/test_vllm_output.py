"""The adapter's reading of vLLM's outputs, which vLLM merges until they are read."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib
from typing import Any

import pytest
from vllm_runs import needs_vllm

from umbra.engines.vllm.vllm_engine import VllmOutput

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


def message(tokens: list[int], logprobs_of: list[int], *, finish_reason: str | None = None) -> Any:
    """An output of vLLM's with flat logprobs: that of token n is -n."""
    outputs = importlib.import_module("vllm.outputs")
    module = importlib.import_module("vllm.logprobs")
    logprobs = module.FlatLogprobs()
    for token in logprobs_of:
        logprobs.append({token: module.Logprob(logprob=float(-token))})
    completion = outputs.CompletionOutput(
        index=0,
        text="",
        token_ids=tokens,
        cumulative_logprob=0.0,
        logprobs=logprobs,
        finish_reason=finish_reason,
    )
    return outputs.RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[completion],
        finished=finish_reason is not None,
    )


def collector() -> Any:
    processing = importlib.import_module("vllm.v1.engine.output_processor")
    kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
    return processing.RequestOutputCollector(kinds.DELTA, "0")


def test_tokens_that_wait_while_their_request_is_aborted_keep_their_logprobs() -> None:
    """vLLM 0.26.0's last message of an aborted request has no tokens, and the logprobs of all."""
    gathered = collector()
    output = VllmOutput(gathered)
    gathered.put(message([5], [5]))
    first = output.take()

    gathered.put(message([6], [6]))
    gathered.put(message([7, 8], [7, 8]))
    gathered.put(message([], [5, 6, 7, 8], finish_reason="abort"))
    last = output.take()

    assert first is not None
    assert last is not None
    assert (first.tokens, first.logprobs) == ([5], [-5.0])
    assert (last.tokens, last.logprobs) == ([6, 7, 8], [-6.0, -7.0, -8.0])
    assert last.finish_reason == "abort"


def test_the_end_of_an_aborted_request_of_which_nothing_waits_brings_nothing() -> None:
    gathered = collector()

    gathered.put(message([], [5, 6], finish_reason="abort"))
    last = VllmOutput(gathered).take()

    assert last is not None
    assert (last.tokens, last.logprobs, last.finish_reason) == ([], [], "abort")
