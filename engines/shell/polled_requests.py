from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from umbra.engines.shell.engine_core import NewOutput, Output, PolledCore
from umbra.engines.shell.engine_requests import EngineRequests, RequestCounts
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.token_deltas import END_TICK_S, DeltaBuffer

_QUIET_PASSES = 3
# Passes of the event loop without a token after which the engine's frontend has handled all earlier
# messages: vLLM's frontend handles some of them in each pass.


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request that the core runs under `key`, which, unlike the id, is never reused."""

    request: GenerationRequest
    key: str
    output: Output
    num_new_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens) + self.num_new_tokens


class PolledRequests(EngineRequests):
    """Requests whose tokens collect on the event loop, for example in a library's frontend.
    One loop takes the tokens of all requests once a tick, so Python runs per request and tick,
    not per token."""

    def __init__(self, core: PolledCore, *, max_num_seqs: int, tick_ms: float) -> None:
        super().__init__()
        self._core = core
        self._max_num_seqs = max_num_seqs
        self._tick_s = tick_ms / 1000
        self._by_id: dict[int, _Running] = {}
        self._has_some = asyncio.Event()
        self._buffer = DeltaBuffer()
        self._serials = itertools.count()
        self._num_tokens_total = 0
        self._version = 0  # held; the previous one while an update is in progress
        self._older_version = 0
        self._num_updates = 0  # committed
        self._to_abort: list[str] = []  # keys of requests to abort
        self._has_to_abort = asyncio.Event()

    @property
    def ids(self) -> Collection[int]:
        return self._by_id.keys()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_forever())
            tasks.create_task(self._abort_forever())

    async def _take_forever(self) -> None:
        while True:
            await self._has_some.wait()
            await self._tick()
            self._take()

    async def _tick(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._tick_s):
                await self._core.ended.wait()
                await asyncio.sleep(END_TICK_S)
        self._core.ended.clear()

    async def _abort_forever(self) -> None:
        while True:
            await self._has_to_abort.wait()
            self._has_to_abort.clear()
            keys, self._to_abort = self._to_abort, []
            await self._core.abort(keys)

    def _take(self) -> int:
        """Sends all new tokens under the version held; returns their number. Raises the engine's
        failure. During an update, tokens of the older version may still arrive."""
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
        older_runs.move_to(self._buffer, self._older_version)
        runs.move_to(self._buffer, self._version)
        for request_id, reason in finishes:
            del self._by_id[request_id]
            self._buffer.add_finish(request_id, reason)
        batch = self._buffer.take()
        if batch is not None:
            self.stream.put(batch)
        self._note_ends()
        num_tokens = len(older_runs.tokens) + len(runs.tokens)
        self._num_tokens_total += num_tokens
        return num_tokens

    def _reason(self, request: GenerationRequest, new: NewOutput) -> str:
        reason = new.finish_reason
        if reason == "length" and len(new.tokens) and new.tokens[-1] in request.stop_token_ids:
            return "stop"  # a stop token that was also the last allowed token
        if reason in ("stop", "length", "abort"):
            return reason
        return f"error: {self._core.name} ended the request with {reason!r}"

    async def deliver(self) -> None:
        """Includes tokens on their way through the engine's frontend."""
        quiet = 0
        while quiet < _QUIET_PASSES:
            quiet = 0 if self._take() else quiet + 1
            await asyncio.sleep(0)

    async def begin_update(self) -> None:
        """Requests that wait have the older cache salt, and a prefix that is cached under it."""
        self._older_version = self._version
        if waiting := [id for id, held in self._by_id.items() if not held.num_new_tokens]:
            await self.abort(waiting)

    def commit_update(self, version: int) -> None:
        self._version = version
        self._num_updates += 1

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        epoch = self.stream.epoch
        added: list[_Running] = []
        num_running = min(len(self._by_id) + len(requests), self._max_num_seqs)
        # A prefix cached under older weights must not be used with newer ones.
        cache_salt = f"weights-{self._num_updates}"
        try:
            for request in requests:
                # No key is a prefix of another, because SGLang would end both.
                key = f"{next(self._serials):012d}-{request.id}"
                output = await self._core.add(key, request, cache_salt, num_running)
                added.append(_Running(request=request, key=key, output=output))
        except BaseException:
            self._abort_soon(added)
            raise
        if epoch != self.stream.epoch:  # their consumer has detached meanwhile
            self._abort_soon(added)
            return
        self._by_id.update((running.request.id, running) for running in added)
        self._note_ends()

    async def abort(self, ids: Collection[int]) -> None:
        """Tokens sampled but not delivered by the engine are lost."""
        await self._core.abort([self._by_id[i].key for i in ids])
        self._take()

    def _forget(self, epoch: int) -> None:
        self._abort_soon(list(self._by_id.values()))
        self._by_id.clear()
        self._buffer.clear()

    def _abort_soon(self, requests: list[_Running]) -> None:
        if requests:
            self._to_abort += [running.key for running in requests]
            self._has_to_abort.set()

    def _note_ends(self) -> None:
        super()._note_ends()
        if self._by_id:
            self._has_some.set()
        else:
            self._has_some.clear()

    async def counts(self) -> RequestCounts:
        num_running = min(len(self._by_id), self._max_num_seqs)
        return RequestCounts(
            running=num_running,
            waiting=len(self._by_id) - num_running,
            tokens_total=self._num_tokens_total,
            kv_tokens_used=sum(running.num_tokens for running in self._by_id.values()),
        )

    def progress(self) -> int | None:
        is_idle = not self._by_id or self._core.is_paused
        return None if is_idle else self._num_tokens_total


class _Runs:
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
