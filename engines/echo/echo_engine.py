"""An engine without a model: the whole protocol, made-up tokens, no torch.

Target: `umbra.engines.echo.echo_engine:EchoEngine`.

Each token of a trajectory follows from its seed, its position and all tokens before it, prompt
included (`EchoTokens`). So a trajectory that was cut resumes exactly, on any engine, and differs if
it is resumed from another context. For tests, benchmarks and trying out a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from umbra.engines.echo.echo_tokens import Drawn, EchoTokens, echo_logprobs
from umbra.engines.echo.echo_weights import EchoReceiver, EchoWeights
from umbra.engines.shell.delta_stream import DeltaStream
from umbra.engines.shell.engine_gate import EngineGate
from umbra.engines.shell.resident_memory import resident_nbytes
from umbra.runtime.engine_api.delta_buffer import DeltaBuffer, DeltaColumns
from umbra.runtime.engine_api.engine_protocol import EngineStats, PauseMode
from umbra.runtime.engine_api.generation_request import GenerationRequest, parse_request
from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag
from umbra.runtime.errors import ConfigError, WeightSyncError
from umbra.runtime.weights.transports.shared_memory.memfd import BucketMappings

_MAX_BURST: Final = 1024
# Tokens of one request made at once where no speed is set, so that a long request still comes in
# several batches.


class _Generation:
    """A request in progress."""

    def __init__(self, request: GenerationRequest, vocab_size: int) -> None:
        self.request = request
        self.tokens = EchoTokens(
            request.seed, request.tokens, vocab_size=vocab_size, position=request.position
        )

    @property
    def num_drawn(self) -> int:
        return self.tokens.position - self.request.position

    def draw(self, count: int) -> Drawn:
        """Up to `count` tokens: none above the budget, none after a stop token."""
        left = self.request.max_new_tokens - self.num_drawn
        return self.tokens.draw(min(count, left), self.request.stop_token_ids)

    def outcome(self, last_token: int) -> str:
        """ "stop" or "length" once complete, else ""."""
        if last_token in self.request.stop_token_ids:
            return "stop"
        return "length" if self.num_drawn == self.request.max_new_tokens else ""


class EchoEngine:
    """Takes the embedded engine's settings too; of them model_path, dtype, device,
    kv_cache_num_tokens and num_threads mean nothing here.

    Args:
        vocab_size: tokens are below it; a prompt with others is refused.
        tokens_per_s: of each running request; None: as fast as it goes.
        verify_checksums: check what a sync delivers (imports torch).
        weights_in_logprobs: keep the bytes of the weights that syncs deliver, and make every
            logprob a function of them, of the token and of what the token follows from
            (`echo_logprobs`; else it is 0). Who knows the bytes of each version can then prove
            which weights were here when a token was made, whatever version it is labelled with.
        load_weights: serve as version 0 at once.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        tokens_per_s: float | None = None,
        verify_checksums: bool = False,
        weights_in_logprobs: bool = False,
        max_num_seqs: int = 256,
        max_context_len: int = 4096,
        tick_ms: float = 50.0,
        load_weights: bool = False,
        model_path: str = "",
        dtype: str = "float32",
        device: str = "cpu",
        kv_cache_num_tokens: int | None = None,
        num_threads: int = 1,
    ) -> None:
        if vocab_size < 1 or max_num_seqs < 1 or (tokens_per_s is not None and tokens_per_s <= 0):
            raise ConfigError(
                f"vocab_size={vocab_size}, max_num_seqs={max_num_seqs} and tokens_per_s="
                f"{tokens_per_s} must be above 0"
            )
        self._vocab_size = vocab_size
        self._tokens_per_s = tokens_per_s
        self._verify_checksums = verify_checksums
        self._weights_in_logprobs = weights_in_logprobs
        self._max_num_seqs = max_num_seqs
        self._max_context_len = max_context_len
        self._tick_s = tick_ms / 1000
        self._gate = EngineGate()
        self._requests: dict[int, _Generation] = {}  # in order of arrival
        self._buffer = DeltaBuffer()
        self._stream = DeltaStream(self._forget)
        self._has_work = asyncio.Event()
        self._is_quiet = asyncio.Event()  # a drain is over
        self._receiver: EchoReceiver | None = None
        self._mappings = BucketMappings()
        self._weights = EchoWeights() if verify_checksums or weights_in_logprobs else None
        self._num_tokens_total = 0
        if load_weights:
            self._gate.start_serving(0)

    async def run(self) -> None:
        """Makes tokens until cancelled; a load that waits for ranks then ends too."""
        try:
            await self._make_tokens_forever()
        finally:
            self._leave_update()

    async def _make_tokens_forever(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await self._has_work.wait()
            allowance, then = 0.0, clock()
            while self._has_work.is_set():
                if self._tokens_per_s is None:
                    self._make_tokens(_MAX_BURST)
                    await asyncio.sleep(0)  # lets requests and aborts in between two bursts
                else:
                    await asyncio.sleep(self._tick_s)  # stands for the time a model takes
                    allowance += (clock() - then) * self._tokens_per_s
                    then = clock()
                    self._make_tokens(int(allowance))
                    allowance -= int(allowance)

    def _make_tokens(self, num_each: int) -> None:
        """Up to `num_each` tokens for every request that has a place."""
        if not self._gate.is_serving or num_each < 1:
            return
        for request_id, generation in list(self._requests.items())[: self._max_num_seqs]:
            start, drawn = generation.tokens.position, generation.draw(num_each)
            self._buffer.add_runs(
                ids=np.array([request_id]),
                positions=np.array([start]),
                counts=np.array([len(drawn.tokens)]),
                tokens=drawn.tokens,
                logprobs=self._logprobs(drawn),
                version=self._gate.version or 0,
            )
            self._num_tokens_total += len(drawn.tokens)
            outcome = generation.outcome(int(drawn.tokens[-1]))
            if outcome:
                del self._requests[request_id]
                self._buffer.add_finish(request_id, outcome)
        self._flush()
        self._settle()

    def _logprobs(self, drawn: Drawn) -> npt.NDArray[np.float32]:
        if not self._weights_in_logprobs:
            return np.zeros(len(drawn.tokens), np.float32)
        return echo_logprobs(drawn.keys, self.weights_fingerprint())

    def _flush(self) -> None:
        batch = self._buffer.take()
        if batch is not None:
            self._stream.put(batch, self._stream.epoch)

    def _settle(self) -> None:
        """Brings the events in line with the state; called after every change."""
        if self._gate.is_draining and not self._requests:
            self._gate.pause()
        _assign(self._has_work, self._gate.is_serving and bool(self._requests))
        _assign(self._is_quiet, not self._gate.is_draining)

    def _forget(self, _epoch: int) -> None:
        self._requests.clear()
        self._buffer.clear()
        self._settle()

    # -- requests ------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self._gate.admit()
        parsed = [
            parse_request(raw, max_context_len=self._max_context_len, vocab_size=self._vocab_size)
            for raw in requests
        ]
        ids = [request.id for request in parsed]
        taken = sorted(set(ids) & self._requests.keys())
        if taken or len(set(ids)) < len(ids):
            raise ValueError(f"request ids must be unique; already here: {taken or 'repeated'}")
        for request in parsed:
            self._requests[request.id] = _Generation(request, self._vocab_size)
        self._settle()

    async def deltas(self) -> AsyncGenerator[DeltaColumns, None]:
        async with aclosing(self._stream.read()) as batches:
            async for batch in batches:
                yield batch

    async def abort(self, ids: Sequence[int] | None) -> int:
        known = self._requests.keys()
        wanted = list(known) if ids is None else [i for i in dict.fromkeys(ids) if i in known]
        for request_id in wanted:
            del self._requests[request_id]
            self._buffer.add_finish(request_id, "abort")
        self._flush()
        self._settle()
        return len(wanted)

    async def pause(self, mode: PauseMode) -> None:
        if mode not in ("abort", "keep", "drain"):
            raise ValueError(f"pause mode must be abort, keep or drain, got {mode!r}")
        if mode == "drain":
            self._gate.drain()
            self._settle()
            await self._is_quiet.wait()
            return
        if mode == "abort":
            await self.abort(None)
        self._gate.pause()
        self._settle()

    async def resume(self) -> None:
        self._gate.resume()
        self._settle()

    # -- memory: there is none, but the states are the same --------------------------------

    async def sleep(self, level: SleepLevel) -> None:
        if not self._requests:
            self._gate.pause()
        self._gate.sleep(level)
        self._leave_update()
        self._mappings.close()
        if self._weights is not None and level == 2:
            self._weights.clear()
        self._settle()

    async def wake(self, tags: Sequence[Tag]) -> None:
        if self._gate.wake(tags):
            self._gate.woken()

    # -- weights -------------------------------------------------------------------------

    async def probe_import(self, allocations: Sequence[Sequence[Any]]) -> str:
        return "it has no GPU"

    async def begin_update(
        self, version: int, manifest: Mapping[str, Any], buckets: Mapping[str, Any]
    ) -> None:
        self._gate.begin_update(version, is_idle=not self._requests)
        self._settle()
        self._receiver = await asyncio.to_thread(
            EchoReceiver,
            manifest,
            buckets,
            self._mappings,
            self._weights,
            verify=self._verify_checksums,
        )

    async def load(self) -> dict[str, int]:
        receiver = self._open_receiver()
        self._gate.touch()
        return {"nbytes": await asyncio.to_thread(receiver.load)}

    async def finish_update(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        return self._open_receiver().finish(regions)

    async def commit_update(self) -> None:
        self._open_receiver()
        self._gate.commit_update()
        self._leave_update()

    async def abort_update(self) -> None:
        self._leave_update()
        self._gate.abort_update()

    def weights_fingerprint(self) -> int:
        """Of the bytes it holds now; of none where it keeps none."""
        return (self._weights or EchoWeights()).fingerprint()

    def _leave_update(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _open_receiver(self) -> EchoReceiver:
        if self._receiver is None:
            raise WeightSyncError("no update is in progress; begin_update comes first")
        return self._receiver

    async def stats(self) -> EngineStats:
        version = self._gate.version
        running = list(self._requests.values())[: self._max_num_seqs]
        return EngineStats(
            running=len(running),
            waiting=len(self._requests) - len(running),
            tokens_total=self._num_tokens_total,
            kv_tokens_used=sum(len(one.request.tokens) + one.num_drawn for one in running),
            version=-1 if version is None else version,
            resident_nbytes=resident_nbytes(),
            weights_nbytes=0,
            kv_nbytes=0,
        )

    def progress(self) -> int | None:
        return self._num_tokens_total if self._has_work.is_set() else None


def _assign(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()
