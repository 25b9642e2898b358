"""Auxiliary pools, such as a judge, for agent loops and reward functions: `ctx.pool(NAME)`.

user code ──ctx.pool("judge").generate()──▶ PoolCaller ──RPC──▶ GeneratorService ──▶ engines
(another thread)                            (worker)          (of the pool)
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.agents.user_thread import TaskHost
from umbra.runtime.rollout.rollout_config import AuxiliaryPoolConfig
from umbra.runtime.rpc.rpc_client import Handle
from umbra.runtime.text.model_tokenizer import ModelTokenizer

_RESOLVE_TIMEOUT_S: Final = 60.0
"""Deadline for a pool's generator to be up again after its death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAnswer:
    """One generation."""

    text: str  # of `tokens`, without end tokens; see `rollout.skip_special_tokens`
    tokens: list[int]
    logprobs: list[float]  # of the tokens, under the distribution they were sampled from
    finish_reason: str  # "stop", or "length" if a budget ended it


class PoolCaller:
    """Passes user code's calls to the pools. Owned by a rollout worker and entered on its loop."""

    def __init__(self, pools: Mapping[str, AuxiliaryPoolConfig]) -> None:
        self._configs = pools
        self._handles: dict[str, Handle] = {}
        self._calls_out: TaskHost

    async def __aenter__(self) -> Self:
        self._calls_out = await TaskHost().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._calls_out.__aexit__(*exc_info)

    def pool(self, name: str, deadline: ExtendableDeadline) -> AuxiliaryPool:
        """The pool's interface; `deadline` is paused while a call waits for the pool."""
        config = self._configs.get(name)
        if config is None:
            known = ", ".join(sorted(self._configs)) or "none"
            raise RolloutError(
                f"there is no pool {name!r}; there are: {known} (a section [pools.{name}] of the "
                "config adds one)"
            )
        return AuxiliaryPool(name, config, self, deadline)

    async def ask(
        self, config: AuxiliaryPoolConfig, arguments: Sequence[object], deadline: ExtendableDeadline
    ) -> dict[str, Any]:
        async def call() -> dict[str, Any]:
            with deadline.paused():
                handle = await self._handle(config.generator)
                answer: dict[str, Any] = await handle.call(
                    "generate", *arguments, timeout_s=config.timeout_s
                )
                return answer

        return await self._calls_out.run(call)

    async def _handle(self, name: str) -> Handle:
        if name not in self._handles:
            context = actor_context()
            self._handles[name] = context.connect(await context.resolve(name, _RESOLVE_TIMEOUT_S))
        return self._handles[name]


class AuxiliaryPool:
    """The interface of agent loops and reward functions to an auxiliary pool.

    A loop that runs again because its process died repeats its calls, unless
    `ctx.once(key)` wraps them.
    """

    def __init__(
        self,
        name: str,
        config: AuxiliaryPoolConfig,
        caller: PoolCaller,
        deadline: ExtendableDeadline,
    ) -> None:
        self.name = name
        self._config = config
        self._caller = caller
        self._deadline = deadline

    def encode(self, text: str) -> list[int]:
        """Tokens of a text by the pool's own tokenizer, which adds no special tokens."""
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        skip = self._config.skip_special_tokens
        return self._tokenizer.decode_completion(tokens, skip)

    async def generate(
        self,
        tokens: Sequence[int],
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        lora: str = "",
    ) -> PoolAnswer:
        """Continues `tokens`, which must come from the pool's own tokenizer.

        Args:
            max_new_tokens: None for as many as the pool's context leaves.
            temperature: 0 is greedy.
            stop_token_ids: the answer ends after any of these; None for the model's own.
            seed: the same seed gives the same answer, as far as the engine's arithmetic does.
            lora: one of the pool's `lora_adapters`; "" for the model as it is.

        Raises:
            RolloutError, RemoteError: the prompt is too long, an argument is out of range, or no
                engine serves. It is RequestRefused if a token is outside the model's vocabulary.
            DeadlineExceeded: no answer within the pool's `request_timeout_s`.
        """
        config = self._config
        stops = self._tokenizer.end_token_ids if stop_token_ids is None else stop_token_ids
        arguments = (
            token_ids(tokens), max_new_tokens, temperature, list(stops), seed, lora,
        )  # fmt: skip
        found = await self._caller.ask(config, arguments, self._deadline)
        answer: list[int] = found["tokens"].tolist()
        return PoolAnswer(
            text=self.decode(answer),
            tokens=answer,
            logprobs=found["logprobs"].tolist(),
            finish_reason=found["finish_reason"],
        )

    async def complete(
        self, text: str, max_new_tokens: int | None = None, **how: Any
    ) -> PoolAnswer:
        """Like `generate`, from a text, with the special tokens that the tokenizer adds."""
        prompt = self._tokenizer.encode_prompt(text)
        return await self.generate(prompt, max_new_tokens, **how)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **how: Any,
    ) -> PoolAnswer:
        """Like `generate`, from messages {"role", "content"}, with the model's chat template.

        Args:
            chat_template_kwargs: variables of the template, besides the pool's own.
            continue_final_message: continues the assistant's final message instead of refusing it.
        """
        variables = {**self._config.chat_template_kwargs, **(chat_template_kwargs or {})}
        # The first call imports transformers, which takes a second.
        text = await asyncio.to_thread(
            self._tokenizer.render_chat,
            messages,
            variables,
            continue_final_message=continue_final_message,
        )
        return await self.generate(self._tokenizer.encode(text), max_new_tokens, **how)

    @property
    def _tokenizer(self) -> ModelTokenizer:
        return _open_tokenizer(self._config.tokenizer_path)


class RewardContext:
    """Passed to reward functions that take an argument `ctx`."""

    def __init__(self, caller: PoolCaller, deadline: ExtendableDeadline) -> None:
        self._caller = caller
        self._deadline = deadline

    def pool(self, name: str) -> AuxiliaryPool:
        """An auxiliary pool, such as a judge."""
        return self._caller.pool(name, self._deadline)


@functools.cache
def _open_tokenizer(path: str) -> ModelTokenizer:
    return ModelTokenizer.open(path)


class ExtendableDeadline:
    """`asyncio.timeout(limit_s)` from `start()` on, with pauses. Entered once, on its own loop."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._remaining_s = limit_s
        self._num_pauses = 0
        self._runs = False

    @property
    def expired(self) -> bool:
        return self._timeout.expired()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._runs = True
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._runs = False
        await self._timeout.__aexit__(*exc_info)

    def start(self) -> None:
        """Lets the time run. Called once, in the block; after the block it does nothing."""
        if self._can_move:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self.limit_s)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Excludes the block's time, after `start()`. The last of several pauses ends them all."""
        loop = asyncio.get_running_loop()
        if not self._num_pauses and self._can_move:
            self._remaining_s = (self._timeout.when() or loop.time()) - loop.time()
            self._timeout.reschedule(None)
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses and self._can_move:
                self._timeout.reschedule(loop.time() + self._remaining_s)

    @property
    def _can_move(self) -> bool:
        return self._runs and not self._timeout.expired()
