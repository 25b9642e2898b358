"""The requests that a foreign engine works on, and their tokens on the way to deltas.

New tokens gather in the engine's frontend until they are taken from all requests once a tick, so
that Python runs per request and tick, not per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from umbra.engines.shell.engine_core import NewOutput, Output
from umbra.runtime.engine_api.delta_buffer import DeltaBuffer
from umbra.runtime.engine_api.generation_request import GenerationRequest


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """One request.

    Attributes:
        key: its name in the engine, never used again, unlike the id.
        num_new_tokens: taken from `output` so far.
    """

    request: GenerationRequest
    key: str
    output: Output
    num_new_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens) + self.num_new_tokens


class RunningRequests:
    """All requests from their submission to their finish. Event loop only.

    Args:
        engine_name: for the reasons of requests that end otherwise than they should.
    """

    def __init__(self, buffer: DeltaBuffer, engine_name: str) -> None:
        self._buffer = buffer
        self._engine_name = engine_name
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

    def keys(self, ids: Iterable[int] | None) -> list[str]:
        """The engine's names of those of `ids` (None: all) that are here."""
        wanted = list(self._by_id) if ids is None else dict.fromkeys(ids)
        return [self._by_id[i].key for i in wanted if i in self._by_id]

    def clear(self) -> list[str]:
        """Forgets all requests; their names in the engine."""
        keys = self.keys(None)
        self._by_id.clear()
        return keys

    def collect(self, version: int, older_version: int) -> int:
        """Moves what has come to the buffer, as made under `version`; how many tokens.

        Raises whatever the engine failed with.

        Args:
            older_version: of what an output says is older.
        """
        runs, older_runs = _Runs(), _Runs()
        finishes: list[tuple[int, str]] = []
        for request_id, running in self._by_id.items():
            new = running.output.take()
            if new is None:
                continue
            position = running.request.position + running.num_new_tokens
            cut = new.num_older
            older_runs.add(request_id, position, new.tokens[:cut], new.logprobs[:cut])
            runs.add(request_id, position + cut, new.tokens[cut:], new.logprobs[cut:])
            running.num_new_tokens += len(new.tokens)
            if new.finish_reason is not None:
                finishes.append((request_id, self._reason(running.request, new)))
        older_runs.move_to(self._buffer, older_version)
        runs.move_to(self._buffer, version)
        for request_id, reason in finishes:
            del self._by_id[request_id]
            self._buffer.add_finish(request_id, reason)
        num_tokens = len(older_runs.tokens) + len(runs.tokens)
        self.num_tokens_total += num_tokens
        return num_tokens

    def _reason(self, request: GenerationRequest, new: NewOutput) -> str:
        reason = new.finish_reason
        if reason == "length" and len(new.tokens) and new.tokens[-1] in request.stop_token_ids:
            return "stop"  # it was the last that was allowed, too
        if reason in ("stop", "length", "abort"):
            return reason
        return f"error: {self._engine_name} ended the request with {reason!r}"


class _Runs:
    """Runs of tokens made under one version, on the way to the buffer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._counts: list[int] = []

    def add(
        self, request_id: int, position: int, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        if len(tokens):
            self._ids.append(request_id)
            self._positions.append(position)
            self._counts.append(len(tokens))
            self.tokens.extend(tokens)
            self._logprobs.extend(logprobs)

    def move_to(self, buffer: DeltaBuffer, version: int) -> None:
        if self._ids:
            buffer.add_runs(
                ids=np.array(self._ids, np.int64),
                positions=np.array(self._positions, np.int64),
                counts=np.array(self._counts, np.int64),
                tokens=np.array(self.tokens, np.int32),
                logprobs=np.array(self._logprobs, np.float32),
                version=version,
            )
