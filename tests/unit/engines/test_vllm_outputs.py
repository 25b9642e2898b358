"""The adapter's side of vLLM's outputs, over what vLLM has in their places."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from umbra.engines.vllm.vllm_outputs import VllmOutput, gather_outputs, send_numbers


def core_output(request: str, tokens: list[int], reason: str | None = None) -> Any:
    return SimpleNamespace(
        request_id=request, new_token_ids=tokens, finish_reason=reason, kv_transfer_params=None
    )


def sent(tokens: dict[str, list[int]], rows: list[str], starts: list[int] | None = None) -> Any:
    """The outputs of a step in which vLLM's sampler had these rows; token n has logprob -n."""
    order = [token for request in rows for token in tokens[request]]
    table = np.array([[-token, 0.5] for token in order], np.float32)
    made = SimpleNamespace(
        logprobs=SimpleNamespace(logprobs=table, cu_num_generated_tokens=starts),
        req_id_to_index={request: row for row, request in enumerate(rows)},
    )

    def update_from_output(scheduled: None, made: Any) -> dict[int, Any]:
        assert made.logprobs is None  # vLLM would slice them
        return {0: SimpleNamespace(outputs=[core_output(*item) for item in tokens.items()])}

    return send_numbers(update_from_output)(None, made)[0].outputs


class Collector:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ready = asyncio.Event()
        self.output: Any = None

    def get_nowait(self) -> Any:
        output, self.output = self.output, None
        return output


class Processor:
    """Handles ends as vLLM's OutputProcessor does."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}
        self.ended = asyncio.Event()
        gather_outputs(self, self.ended)

    def add(self, request: str) -> VllmOutput:
        flat = SimpleNamespace(logprobs=[])
        collector = Collector(request)
        self.request_states[request] = SimpleNamespace(
            detokenizer=SimpleNamespace(token_ids=[]),
            logprobs_processor=SimpleNamespace(logprobs=flat),
            queue=collector,
        )
        return VllmOutput(collector, self)

    def process_outputs(self, outputs: list[Any], timestamp: float) -> float:
        for output in outputs:
            tokens = self.request_states[output.request_id].detokenizer.token_ids
            tokens.extend(output.new_token_ids)
            self.end(output.request_id, output.finish_reason)
        return timestamp

    def end(self, request: str, reason: str) -> None:
        state = self.request_states.pop(request)
        completion = SimpleNamespace(
            token_ids=state.detokenizer.token_ids,
            logprobs=state.logprobs_processor.logprobs,
            finish_reason=reason,
        )
        state.queue.output = SimpleNamespace(outputs=[completion])


def taken(output: VllmOutput) -> Any:
    new = output.take()
    return new and (new.tokens, new.logprobs, new.finish_reason)


@pytest.mark.parametrize("starts", [None, [0, 1, 2]])
def test_a_token_has_the_logprob_of_its_row(starts: list[int] | None) -> None:
    outputs = sent({"a": [5], "b": [6], "c": [7]}, ["c", "a", "b"], starts)

    assert [output.kv_transfer_params for output in outputs] == [
        {"logprobs": [-5.0]},
        {"logprobs": [-6.0]},
        {"logprobs": [-7.0]},
    ]


def test_rows_of_several_tokens_begin_where_the_sampler_says() -> None:
    outputs = sent({"a": [5, 6], "b": [7]}, ["a", "b"], [0, 2])

    assert [output.kv_transfer_params["logprobs"] for output in outputs] == [[-5.0, -6.0], [-7.0]]


def test_what_was_taken_does_not_come_again_and_the_end_brings_the_rest() -> None:
    processor = Processor()
    output = processor.add("a")
    assert taken(output) is None

    for token in (5, 6):
        assert processor.process_outputs(sent({"a": [token]}, ["a"]), 1.5) == 1.5
    assert taken(output) == ([5, 6], [-5.0, -6.0], None)
    assert taken(output) is None
    assert not processor.ended.is_set()

    last = sent({"a": [7]}, ["a"])
    last[0].finish_reason = "length"
    processor.process_outputs(last, 1.5)

    assert processor.ended.is_set()
    assert taken(output) == ([7], [-7.0], "length")


def test_tokens_that_wait_while_their_request_is_aborted_keep_their_logprobs() -> None:
    processor = Processor()
    output = processor.add("a")
    processor.process_outputs(sent({"a": [5]}, ["a"]), 0.0)
    assert taken(output) == ([5], [-5.0], None)

    processor.process_outputs(sent({"a": [6]}, ["a"]), 0.0)
    processor.end("a", "abort")
    processor.process_outputs(sent({"a": [7]}, ["a"]), 0.0)  # was on its way

    assert taken(output) == ([6], [-6.0], "abort")


def test_a_request_that_ends_while_it_is_added_lacks_nothing() -> None:
    processor = Processor()
    processor.add("a")
    collector = processor.request_states["a"].queue
    last = sent({"a": [5]}, ["a"])
    last[0].finish_reason = "stop"
    processor.process_outputs(last, 0.0)

    assert taken(VllmOutput(collector, processor)) == ([5], [-5.0], "stop")


def test_a_token_without_logprob_ends_the_engine() -> None:
    processor = Processor()
    processor.add("a")

    with pytest.raises(TypeError):
        processor.process_outputs([core_output("a", [5])], 0.0)
