from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from umbra.engines.echo.echo_tokens import EchoTokens, echo_logprobs
from umbra.engines.echo.echo_weights import EchoWeights
from umbra.engines.shell.engine_core import NewOutput, PolledCore
from umbra.runtime.engine_api.generation_request import GenerationRequest

_MAX_BURST: Final = 1024
# Tokens of one request made at once where no speed is set: a long one still takes several batches.


class EchoCore(PolledCore):
    """Makes tokens when they are taken, as many as time and `tokens_per_s` of each request allow. A
    level 2 sleep loses `weights`; with `weights_in_logprobs`, logprobs depend on them."""

    name = "echo"
    keeps_requests_asleep = True

    def __init__(
        self,
        *,
        vocab_size: int,
        tokens_per_s: float | None,
        max_num_seqs: int,
        weights: EchoWeights | None,
        weights_in_logprobs: bool,
    ) -> None:
        super().__init__()
        self._tokens_per_s = tokens_per_s
        self._max_num_seqs = max_num_seqs
        self._weights = weights
        self._weights_in_logprobs = weights_in_logprobs
        self._live: dict[str, _EchoOutput] = {}  # in order of arrival
        self._num_running = 0
        self.vocab_size = vocab_size

    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> _EchoOutput:
        self._live[key] = output = _EchoOutput(self, key, request)
        self._start_waiting()
        return output

    async def abort(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self._live:
                self._live[key].is_aborted = True
                self.remove(key)

    def remove(self, key: str) -> None:
        if self._live.pop(key).since is not None:
            self._num_running -= 1
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._num_running < min(self._max_num_seqs, len(self._live)):
            for output in islice(self._live.values(), self._max_num_seqs):
                if output.since is None:
                    output.since = asyncio.get_running_loop().time()
                    self._num_running += 1
            self.hurry()

    def hurry(self) -> None:
        """Takes tokens before the tick if no speed is set."""
        if self._tokens_per_s is None:
            self.ended.set()

    def allowance(self, output: _EchoOutput) -> int:
        """Tokens that a request may have had since the last take."""
        if self.is_paused or output.since is None:
            return 0
        if self._tokens_per_s is None:
            return _MAX_BURST
        now = asyncio.get_running_loop().time()
        count = int((now - output.since) * self._tokens_per_s)
        output.since += count / self._tokens_per_s
        return count

    def logprobs(self, keys: Any) -> list[float]:
        if not self._weights_in_logprobs or self._weights is None:
            return [0.0] * len(keys)
        return echo_logprobs(keys, self._weights.fingerprint()).tolist()

    async def pause(self, *, keep: bool) -> None:
        self.is_paused = True
        if not keep:
            await self.abort(list(self._live))

    async def resume(self) -> None:
        self.is_paused = False
        now = asyncio.get_running_loop().time()
        for output in self._live.values():
            if output.since is not None:
                output.since = now
        self.hurry()

    async def sleep(self, level: int) -> None:
        if level == 2 and self._weights is not None:
            self._weights.clear()

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return "the echo engine has no GPU"


class _EchoOutput:
    """A request in progress; `since` is the loop time of its last token, None while
    it waits to run."""

    def __init__(self, core: EchoCore, key: str, request: GenerationRequest) -> None:
        self._core = core
        self._key = key
        self._request = request
        self._tokens = EchoTokens(
            request.seed, request.tokens, vocab_size=core.vocab_size, position=request.position
        )
        self.since: float | None = None
        self.is_aborted = False
        self.changed = asyncio.Event()

    def take(self) -> NewOutput | None:
        if self.is_aborted:
            return NewOutput(tokens=[], logprobs=[], finish_reason="abort")
        request = self._request
        left = request.max_new_tokens - (self._tokens.position - request.position)
        count = min(self._core.allowance(self), left)
        if count == 0:
            return None
        drawn = self._tokens.draw(count, request.stop_token_ids)
        tokens: list[int] = drawn.tokens.tolist()
        reason = None
        if tokens[-1] in request.stop_token_ids:
            reason = "stop"
        elif len(tokens) == left:
            reason = "length"
        if reason is None:
            self._core.hurry()
        else:
            self._core.remove(self._key)
        return NewOutput(
            tokens=tokens, logprobs=self._core.logprobs(drawn.keys), finish_reason=reason
        )
