"""transformers' `generate` as an engine: the example of docs/write-an-engine.md.

Target: `transformers_engine:TransformersEngine`.

A call of `generate` takes all requests, from the tokens they have so far. Where one comes, is
aborted or frozen, the call ends, and the next one has those that continue.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from umbra.engines.embedded.sampler import sample, uniforms
from umbra.engines.loading.loader_recording import WatchedLoader
from umbra.engines.loading.worker_updates import WorkerUpdates
from umbra.engines.shell.adapter_engine import AdapterCore, ConfiguredEngine
from umbra.engines.shell.adapter_settings import AdapterSettings
from umbra.engines.shell.engine_core import NewOutput
from umbra.runtime.engine_api.generation_request import GenerationRequest

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TransformersOutput:
    """One request. The thread that generates adds tokens; the event loop takes them."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: str | None = None
    num_taken: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, token: int, logprob: float) -> None:
        self.logprobs.append(logprob)
        self.tokens.append(token)
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.finish_reason = "length"

    def take(self) -> NewOutput | None:
        self.changed.clear()
        reason = self.finish_reason  # read before the tokens: none come after it
        start, self.num_taken = self.num_taken, len(self.tokens)
        if start == self.num_taken and reason is None:
            return None
        new = slice(start, self.num_taken)
        return NewOutput(tokens=self.tokens[new], logprobs=self.logprobs[new], finish_reason=reason)


class TransformersCore(AdapterCore):
    """Owns the model, and the task that generates while there are requests."""

    name = "transformers"

    def __init__(self, settings: AdapterSettings) -> None:
        super().__init__()
        self._settings = settings
        self._live: dict[str, TransformersOutput] = {}
        self._task: asyncio.Task[None] | None = None
        self._may_generate = asyncio.Event()
        self._is_quiet = asyncio.Event()  # the model computes nothing
        self._is_quiet.set()
        self.is_interrupted = False  # `generate` is to end after this token

    @property
    def frees_memory_asleep(self) -> bool:
        return False  # there is no `sleep` here

    async def start(self) -> None:
        path, dtype = self._settings.model_path, getattr(torch, self._settings.dtype)
        model: Any = transformers.AutoModelForCausalLM
        if self._settings.load_weights:
            self._model = model.from_pretrained(path, dtype=dtype)
        else:
            self._model = model.from_config(
                transformers.AutoConfig.from_pretrained(path), dtype=dtype
            )
        # A tied one under each of its names.
        named = self._model.named_parameters(remove_duplicate=False)
        self._parameters: dict[str, Tensor] = dict(named)
        loader = WatchedLoader(self.name, self._model, self._load_weights)
        self._updates = WorkerUpdates(self._model, loader)
        self.vocab_size = int(self._model.config.vocab_size)
        nbytes = sum(parameter.nbytes for parameter in set(self._parameters.values()))
        self.memory = {"weights_nbytes": nbytes, "kv_nbytes": 0}
        self._task = asyncio.get_running_loop().create_task(self._generate_forever())
        self._task.add_done_callback(self._on_done)

    async def stop(self) -> None:
        self.is_interrupted = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._updates.close()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            logger.error("generate failed", exc_info=task.exception())
            self.died.set()

    # -- requests ------------------------------------------------------------------------

    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> TransformersOutput:
        self._live[key] = output = TransformersOutput(request)
        self._interrupt()
        return output

    async def abort(self, keys: Iterable[str]) -> None:
        for output in [self._live.pop(key) for key in keys if key in self._live]:
            output.finish_reason = output.finish_reason or "abort"
        self._interrupt()

    # -- states --------------------------------------------------------------------------

    async def pause(self, *, keep: bool) -> None:
        self.is_paused = True
        if not keep:
            await self.abort(list(self._live))
        self._interrupt()
        await self._is_quiet.wait()

    async def resume(self) -> None:
        self.is_paused = False
        self._interrupt()

    # -- weights -------------------------------------------------------------------------

    async def ask_workers(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        return self.checked([await asyncio.to_thread(self._updates.obey, order)])

    @torch.no_grad()
    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in self._parameters:
                self._parameters[name].copy_(tensor)

    # -- generating ----------------------------------------------------------------------

    def _interrupt(self) -> None:
        self.is_interrupted = True
        if self._live and not self.is_paused:
            self._may_generate.set()
        else:
            self._may_generate.clear()

    async def _generate_forever(self) -> None:
        while True:
            while not self._may_generate.is_set():  # it may be cleared before this task wakes
                await self._may_generate.wait()
            outputs = list(self._live.values())
            self.is_interrupted = False
            self._is_quiet.clear()
            await asyncio.to_thread(self._generate, outputs)
            self._live = {key: o for key, o in self._live.items() if o.finish_reason is None}
            self._interrupt()
            self._is_quiet.set()
            self.ended.set()
            for output in outputs:
                output.changed.set()

    @torch.inference_mode()
    def _generate(self, outputs: Sequence[TransformersOutput]) -> None:
        """In a thread, until all have ended or `is_interrupted`."""
        contexts = [[*output.request.tokens.tolist(), *output.tokens] for output in outputs]
        longest = max(map(len, contexts))
        self._model.generate(
            torch.tensor([[0] * (longest - len(context)) + context for context in contexts]),
            attention_mask=torch.tensor(
                [[0] * (longest - len(context)) + [1] * len(context) for context in contexts]
            ),
            max_new_tokens=max(o.request.max_new_tokens - len(o.tokens) for o in outputs),
            do_sample=False,
            pad_token_id=0,
            logits_processor=[_Draws(outputs)],
            stopping_criteria=[_Ends(outputs, self)],
        )


class _Draws(LogitsProcessor):
    """Chooses tokens by (seed, position), adds them, and leaves `generate` no other choice."""

    def __init__(self, outputs: Sequence[TransformersOutput]) -> None:
        self._outputs = outputs
        requests = [output.request for output in outputs]
        temperatures = torch.tensor([[request.temperature] for request in requests])
        self._is_greedy = temperatures[:, 0] == 0
        self._temperatures = temperatures.where(temperatures > 0, 1.0)
        self._seeds = np.array([request.seed for request in requests], np.uint64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        positions = np.array([o.request.position + len(o.tokens) for o in self._outputs])
        tokens, logprobs = sample(
            scores,
            temperatures=self._temperatures,
            is_greedy=self._is_greedy,
            uniforms=torch.as_tensor(uniforms(self._seeds, positions))[:, None],
        )
        for output, token, logprob in zip(
            self._outputs, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            if output.finish_reason is None:
                output.push(token, logprob)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _Ends(StoppingCriteria):
    def __init__(self, outputs: Sequence[TransformersOutput], core: TransformersCore) -> None:
        self._outputs = outputs
        self._core = core

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        interrupted = self._core.is_interrupted
        return torch.tensor([interrupted or o.finish_reason is not None for o in self._outputs])


class TransformersEngine(ConfiguredEngine):
    """Takes the fields of `AdapterSettings`."""

    settings_class = AdapterSettings
    core_class = TransformersCore
