from __future__ import annotations

import asyncio
from typing import Any

from umbra.engines.shell.engine_core import NewOutput


class VllmOutput:
    """Wraps RequestOutputCollector, which merges outputs that were not taken."""

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
    """The sampled tokens' logprobs, the only ones that vLLM returns with `logprobs=0`. In vLLM
    0.26.0 the final output of an abort has no tokens of its own, but appends all logprobs so far to
    those of the tokens that it is merged with."""
    if not completion.token_ids:
        return []
    flat = completion.logprobs
    # Flat: a position's logprobs begin at its start, the sampled token's first.
    starts = flat.start_indices[: len(completion.token_ids)]
    return [flat.logprobs[start] for _, start in zip(completion.token_ids, starts, strict=True)]
