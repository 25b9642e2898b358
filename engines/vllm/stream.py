"""The requests that vLLM works on, and their tokens on the way to deltas.

vLLM gathers each request's new tokens in a collector of its own, merging what is not yet taken;
they are taken from all of them once a tick, so that Python runs per request and tick, not per
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from umbra.engines.deltas import DeltaBuffer
from umbra.engines.requests import GenerationRequest


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """One request.

    Attributes:
        key: its name in vLLM, never used again, unlike the id.
        collector: vLLM's RequestOutputCollector.
        num_new_tokens: taken from it so far.
    """

    request: GenerationRequest
    key: str
    collector: Any
    num_new_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens) + self.num_new_tokens


class RunningRequests:
    """All requests from their submission to their finish. Event loop only."""

    def __init__(self, buffer: DeltaBuffer) -> None:
        self._buffer = buffer
        self._by_id: dict[int, RunningRequest] = {}
        self.num_tokens_total = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def add(self, running: RunningRequest) -> None:
        self._by_id[running.request.id] = running

    def discard(self, request_id: int) -> RunningRequest | None:
        return self._by_id.pop(request_id, None)

    def keys(self, ids: Iterable[int] | None) -> list[str]:
        """vLLM's names of those of `ids` (None: all) that are here."""
        wanted = list(self._by_id) if ids is None else dict.fromkeys(ids)
        return [self._by_id[i].key for i in wanted if i in self._by_id]

    def clear(self) -> list[str]:
        """Forgets all requests; their names in vLLM."""
        keys = self.keys(None)
        self._by_id.clear()
        return keys

    def collect(self, version: int) -> int:
        """Moves what has come to the buffer, as made under `version`; how many tokens.

        Raises whatever vLLM failed with.
        """
        ids: list[int] = []
        positions: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        finishes: list[tuple[int, str]] = []
        for request_id, running in self._by_id.items():
            output = running.collector.get_nowait()
            if output is None:
                continue
            completion = output.outputs[0]
            count = len(completion.token_ids)
            if count:
                ids.append(request_id)
                positions.append(running.request.position + running.num_new_tokens)
                counts.append(count)
                tokens.extend(completion.token_ids)
                logprobs.extend(_sampled_logprobs(completion))
                running.num_new_tokens += count
            if output.finished:
                finishes.append((request_id, _reason(running.request, completion)))
        if ids:
            self._buffer.add_runs(
                ids=np.array(ids, np.int64),
                positions=np.array(positions, np.int64),
                counts=np.array(counts, np.int64),
                tokens=np.array(tokens, np.int32),
                logprobs=np.array(logprobs, np.float32),
                version=version,
            )
        for request_id, reason in finishes:
            del self._by_id[request_id]
            self._buffer.add_finish(request_id, reason)
        self.num_tokens_total += len(tokens)
        return len(tokens)


def _sampled_logprobs(completion: Any) -> list[float]:
    """One for each token: with `logprobs=0` vLLM gives those of the sampled tokens alone."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [position[token].logprob for token, position in pairs]


def _reason(request: GenerationRequest, completion: Any) -> str:
    reason = str(completion.finish_reason)
    tokens = completion.token_ids
    if reason == "length" and len(tokens) and tokens[-1] in request.stop_token_ids:
        return "stop"  # it was the last that was allowed, too
    if reason in ("stop", "length", "abort"):
        return reason
    return f"error: vLLM ended the request with {reason!r}"
