"""How tokens and their logprobs come from vLLM's scheduler to the adapter. vLLM itself would send
three arrays and make three objects for each request and step.

    EngineCore   Scheduler.update_from_output ─▶ SchedulerOutputs: numbers beside the tokens
    frontend     OutputProcessor.process_outputs ─▶ `gather_outputs`: lists that grow ─▶ VllmOutput
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from umbra.engines.shell.engine_core import NewOutput
from umbra.runtime.engine_api.generation_request import GenerationRequest

_LOGPROBS: Final = "logprobs"  # in an output's kv_transfer_params, the one field for any value


def send_numbers(update_from_output: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def update(scheduled: Any, made: Any) -> Any:
        logprobs, made.logprobs = made.logprobs, None
        updated = update_from_output(scheduled, made)
        if logprobs is None:
            return updated
        values: list[float] = logprobs.logprobs[:, 0].tolist()  # the sampled tokens' come first
        starts = logprobs.cu_num_generated_tokens
        for message in updated.values():
            for output in message.outputs:
                if num_tokens := len(output.new_token_ids):
                    row = made.req_id_to_index[output.request_id]
                    start = row if starts is None else starts[row]
                    output.kv_transfer_params = {_LOGPROBS: values[start : start + num_tokens]}
        return updated

    return update


def gather_outputs(processor: Any, ended: asyncio.Event) -> None:
    """Makes vLLM's OutputProcessor add all but the last output of each request to the lists of its
    state. `ended` is set when a request has ended."""
    states, process_outputs = processor.request_states, processor.process_outputs

    def process(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        last: list[Any] = []
        for output in outputs:
            state = states.get(output.request_id)
            if state is None:  # aborted
                continue
            if output.new_token_ids:
                logprobs = output.kv_transfer_params[_LOGPROBS]
                state.logprobs_processor.logprobs.logprobs.extend(logprobs)
            if output.finish_reason is None:
                state.detokenizer.token_ids.extend(output.new_token_ids)
            else:
                last.append(output)
        if last:
            ended.set()
        return process_outputs(last, *args, **kwargs)

    processor.process_outputs = process


class VllmOutput:
    """A request's growing lists, and its collector, which gets them at the end or an error."""

    def __init__(self, collector: Any, processor: Any) -> None:
        self._collector = collector
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._num_taken = 0
        state = processor.request_states.get(collector.request_id)
        if state is not None:  # it has not ended yet
            self._tokens = state.detokenizer.token_ids
            self._logprobs = state.logprobs_processor.logprobs.logprobs

    @property
    def changed(self) -> asyncio.Event:
        """Set by the end or an error."""
        ready: asyncio.Event = self._collector.ready
        return ready

    def take(self) -> NewOutput | None:
        output = self._collector.get_nowait()
        reason = None
        if output is not None:
            completion = output.outputs[0]
            reason = str(completion.finish_reason)
            self._tokens, self._logprobs = completion.token_ids, completion.logprobs.logprobs
        start, self._num_taken = self._num_taken, len(self._tokens)
        if reason is None and start == self._num_taken:
            return None
        return NewOutput(
            tokens=self._tokens[start:], logprobs=self._logprobs[start:], finish_reason=reason
        )


class ForcedOutput(VllmOutput):
    """The logprobs of forced tokens, which vLLM has as the end of its prompt. It generates one more
    token, which is dropped."""

    def __init__(self, collector: Any, processor: Any, request: GenerationRequest) -> None:
        super().__init__(collector, processor)
        self._forced: list[int] = request.forced.tolist()

    def take(self) -> NewOutput | None:
        output = self._collector.get_nowait()
        if output is None:
            return None
        reason = str(output.outputs[0].finish_reason)
        if reason != "length":
            return NewOutput(tokens=[], logprobs=[], finish_reason=reason)
        logprobs = output.prompt_logprobs.logprobs[-len(self._forced) :]
        return NewOutput(tokens=self._forced, logprobs=logprobs, finish_reason="length")
