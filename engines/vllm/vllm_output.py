"""Collects the tokens of one request in vLLM's frontend."""

from __future__ import annotations

import asyncio
from typing import Any

from umbra.engines.shell.engine_core import NewOutput


class VllmOutput:
    """Wraps vLLM's RequestOutputCollector, which merges outputs that have not been taken yet."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    @property
    def changed(self) -> asyncio.Event:
        ready: asyncio.Event = self._collector.ready
        return ready

    def take(self) -> NewOutput | None:
        output = self._collector.get_nowait()
        if output is None:
            return None
        completion = output.outputs[0]
        return NewOutput(
            tokens=completion.token_ids,
            logprobs=_sampled_logprobs(completion),
            finish_reason=str(completion.finish_reason) if output.finished else None,
        )


def _sampled_logprobs(completion: Any) -> list[float]:
    """One logprob per token: with `logprobs=0` vLLM returns only those of the sampled tokens.

    In vLLM 0.26.0 the final output of an abort carries no tokens but repeats all logprobs so far.
    They follow those of the tokens that it was merged with.
    """
    if not completion.token_ids:
        return []
    flat = completion.logprobs
    # Flat: a position's logprobs begin at its start, with that of the sampled token.
    starts = flat.start_indices[: len(completion.token_ids)]
    return [flat.logprobs[start] for _, start in zip(completion.token_ids, starts, strict=True)]
