"""Driving an engine in a test: requests, collected results, a running engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias

import numpy as np
import torch
from torch import Tensor

from umbra.engines.echo.echo_engine import EchoEngine
from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.engines.embedded.embedded_worker import load_checkpoint, parse_dtype
from umbra.engines.embedded.kv_cache import KvCache
from umbra.engines.embedded.scheduler import Limits
from umbra.engines.faulty.faulty_engine import FaultyEngine
from umbra.engines.shell.adapter_engine import AdapterEngine
from umbra.runtime.engine_api.decoder_config import load_model_config
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.token_deltas import DeltaColumns

DEADLINE_S = 60.0
P = ParamSpec("P")


@dataclass
class Completion:
    """The results of one request; checks that runs follow each other without gaps."""

    next_position: int | None = None
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    reason: str | None = None


class Collector:
    """Applies delta batches, as a rollout manager would."""

    def __init__(self) -> None:
        self.completions: dict[int, Completion] = {}
        self.num_batches = 0

    def __getitem__(self, request_id: int) -> Completion:
        return self.completions.setdefault(request_id, Completion())

    def apply(self, batch: DeltaColumns) -> None:
        self.num_batches += 1
        bounds = batch["offsets"].tolist()
        for run, request_id in enumerate(batch["ids"].tolist()):
            completion = self[request_id]
            position = int(batch["positions"][run])
            assert completion.reason is None, "a run after its finish"
            assert completion.next_position in (None, position), "a gap or a repeat"
            tokens = batch["tokens"][bounds[run] : bounds[run + 1]].tolist()
            assert tokens, "an empty run"
            completion.next_position = position + len(tokens)
            completion.tokens += tokens
            completion.logprobs += batch["logprobs"][bounds[run] : bounds[run + 1]].tolist()
            completion.versions += [int(batch["versions"][run])] * len(tokens)
        for request_id, reason in zip(
            batch["finished_ids"].tolist(), batch["finish_reasons"], strict=True
        ):
            assert self[request_id].reason is None, "finished twice"
            self[request_id].reason = reason

    def num_finished(self) -> int:
        return sum(c.reason is not None for c in self.completions.values())


def wire_request(request_id: int, tokens: Sequence[int], **changes: Any) -> dict[str, Any]:
    """A request as it comes over the wire."""
    request: dict[str, Any] = {
        "id": request_id,
        "tokens": np.array(tokens, np.int32),
        "position": 0,
        "seed": 1000 + request_id,
        "max_new_tokens": 8,
        "temperature": 1.0,
        "stop_token_ids": [],
    }
    return request | changes


def make_request(request_id: int, tokens: Sequence[int], **changes: Any) -> GenerationRequest:
    fields = wire_request(request_id, tokens, **changes)
    fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
    return GenerationRequest(**fields)


def load_model(
    folder: Path, dtype: str = "float32", max_context_len: int = 256, device: str = "cpu"
) -> DecoderModel:
    model = DecoderModel(
        load_model_config(str(folder)),
        max_context_len=max_context_len,
        dtype=parse_dtype(dtype),
        device=torch.device(device),
    )
    load_checkpoint(str(folder), model.parameters)
    return model


def forced_logprobs(model: DecoderModel, sequences: list[list[int]], num_prompt: int) -> Tensor:
    """Log-probabilities [B, T - num_prompt + 1, V] by prefill of a prompt and forced decoding."""
    device = model.parameters.device
    tokens = torch.tensor(sequences, device=device)
    num_seqs, num_tokens = tokens.shape
    cache = KvCache(
        model.config,
        num_tokens=num_seqs * 128,
        dtype=model.parameters.dtype,
        device=device,
    )
    cache.set_capacity(128, num_rows=0, num_tokens=0)

    def places(at: int) -> Tensor:
        return torch.full((num_seqs,), at, device=device)

    with torch.inference_mode():
        steps = [
            model.prefill(
                tokens[:, :num_prompt], places(num_prompt - 1), cache, first_row=0, copies=None
            ),
            *(
                model.decode(tokens[:, at], places(at), cache, span=at + 1)
                for at in range(num_prompt, num_tokens)
            ),
        ]
    return torch.log_softmax(torch.stack(steps, 1), -1).cpu()


def make_core(model: DecoderModel, **limits: Any) -> EngineCore:
    settings = {"max_num_seqs": 16, "max_context_len": 256, "kv_cache_num_tokens": 16 * 256}
    return EngineCore(model, Limits(**(settings | limits)))


def run_to_end(core: EngineCore, requests: Iterable[GenerationRequest] = ()) -> Collector:
    """Steps until nothing is left."""
    collector = Collector()
    core.add(list(requests))
    while core.has_work:
        core.step()
        take(core, collector)
    take(core, collector)
    return collector


def take(core: EngineCore, collector: Collector) -> None:
    batch = core.take_deltas()
    if batch is not None:
        collector.apply(batch)


Engine: TypeAlias = EchoEngine | EmbeddedEngine | FaultyEngine | AdapterEngine


@asynccontextmanager
async def running(engine: Engine) -> AsyncGenerator[None]:
    """Enters the engine and runs it, like the actor host."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        task = tasks.create_task(engine.run())
        try:
            yield
        finally:
            task.cancel()


_shared_loops: list[asyncio.Runner] = []


@contextmanager
def shared_loop() -> Generator[asyncio.Runner]:
    """One loop for all of `run_async` meanwhile: an engine that tests share lives on it."""
    with asyncio.Runner() as runner:
        _shared_loops.append(runner)
        try:
            yield runner
        finally:
            _shared_loops.pop()


def run_async(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await body()

    if not _shared_loops:
        asyncio.run(limited())
        return
    runner = _shared_loops[-1]
    with ThreadPoolExecutor() as threads:  # the loop's own would be left behind
        runner.get_loop().set_default_executor(threads)
        runner.run(limited())


def on_the_engines_loop(
    test: Callable[P, Coroutine[Any, Any, None]],
) -> Callable[P, None]:
    """Makes a test of a coroutine, by `run_async`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_async(lambda: test(*args, **kwargs))

    return run


async def collect(engine: Engine, collector: Collector, num_finished: int) -> None:
    """Reads deltas until so many requests have finished."""
    async with aclosing(engine.deltas()) as batches:
        async for batch in batches:
            collector.apply(batch)
            if collector.num_finished() >= num_finished:
                return
