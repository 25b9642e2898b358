"""Agent loops: user code that drives a trajectory through several generations.

    async def run(ctx: AgentContext, sample: dict) -> float | None:
        tokens = list(ctx.prompt_tokens)
        while True:
            answer = await ctx.generate(tokens)
            tokens += answer
            if not wants_tool(ctx.decode(answer)):
                return None                      # the reward function scores it
            tokens += ctx.encode(tool_result)    # given, not generated: not trained on

Turns are appended as tokens; the text of a trajectory is never tokenized again. docs/agents.md is
the guide for users.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.errors import ConfigError, RewardError, RolloutError
from umbra.runtime.rollout.agents.auxiliary_pool import (
    AuxiliaryPool,
    ExtendableDeadline,
    PoolCaller,
)
from umbra.runtime.rollout.agents.reward_function import reward_value
from umbra.runtime.rollout.agents.user_thread import UserThread
from umbra.runtime.rollout.rollout_config import WorkerConfig
from umbra.runtime.rollout.user_function import (
    advice,
    check_call,
    describe,
    is_async,
    load_function,
)
from umbra.runtime.text.model_tokenizer import ModelTokenizer

_CATCH: Final = "; catch what may fail inside the loop"
_NO_NUMBER: Final = "return a finite number, or None to have the reward function score it"


class AgentContext:
    """The interface that an agent loop gets; belongs to one run of the loop.

    Attributes:
        sample: the data set's row.
        prompt, prompt_tokens: from the data set.
        finish_reason: of the last generation: "stop", or "length" if a budget ended it.
    """

    def __init__(
        self,
        item: Mapping[str, Any],
        config: WorkerConfig,
        tokenizer: ModelTokenizer,
        call: Callable[..., Awaitable[Any]],
        pools: PoolCaller,
        deadline: ExtendableDeadline,
    ) -> None:
        """`call` calls a method of `AgentSessions` for this run's session."""
        self.sample: dict[str, Any] = item["row"]
        self.prompt: str = item["prompt"]
        self.prompt_tokens: list[int] = item["tokens"].tolist()
        self.finish_reason = ""
        self._config = config
        self._tokenizer = tokenizer
        self._call = call
        self._pools = pools
        self._deadline = deadline
        self._num_side_generations = 0

    def encode(self, text: str) -> list[int]:
        """Tokens of a text to append, by the policy's tokenizer, which adds none."""
        return self._tokenizer.encode_more(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Tokens of a chat up to the beginning of the assistant's answer. `variables` add to
        `data.chat_template_kwargs`."""
        known = self._config.chat_template_kwargs
        return self._tokenizer.encode_chat(messages, **{**known, **variables})

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode_completion(tokens, self._config.skip_special_tokens)

    def pool(self, name: str) -> AuxiliaryPool:
        """An auxiliary pool of the config, such as a judge."""
        return self._pools.pool(name, self._deadline)

    async def generate(
        self, tokens: Sequence[int], max_new_tokens: int | None = None, *, lora: str = ""
    ) -> list[int]:
        """Continues `tokens` and returns the new ones; `tokens` is not changed.

        After the first call, `tokens` must begin with the last context and the tokens generated
        from it. Tokens after these count as given.

        Args:
            max_new_tokens: None for the rest of the trajectory's budget, or with `lora` of the
                context. When nothing is left, the answer is empty and `finish_reason` is "length";
                `tokens` beyond the model's context are then not part of the trajectory.
            lora: one of the pool's `lora_adapters`, added to the policy's weights. Such a
                generation is not part of the trajectory: `tokens` may be any, and the new ones
                count as given if they are appended to the trajectory's.

        Raises:
            RolloutError: `tokens` differs from the trajectory, or generation is impossible. It is
                RequestRefused for a token outside the vocabulary, or an adapter the pool lacks.
        """
        context = token_ids(tokens)
        if lora:
            self._num_side_generations += 1
            # A loop that runs again must get the same tokens, or its context would differ.
            digest = xxhash.xxh3_64_hexdigest(context.tobytes())
            key = f"lora {self._num_side_generations} {lora} {digest}"
            new_tokens, self.finish_reason = await self.once(
                key, lambda: self._generate_with_adapter(context, max_new_tokens, lora)
            )
            return list(new_tokens)
        answer = await self._call("generate", context, max_new_tokens)
        self.finish_reason = answer["finish_reason"]
        return list(answer["tokens"].tolist())

    async def _generate_with_adapter(
        self, context: NDArray[np.int32], max_new_tokens: int | None, lora: str
    ) -> list[Any]:
        answer = await self._call("generate", context, max_new_tokens, lora)
        return [answer["tokens"].tolist(), answer["finish_reason"]]

    async def once(self, key: str, effect: Callable[[], Any]) -> Any:
        """Returns what `effect()` returned when this trajectory's loop first reached this call.

        A loop whose process dies runs again: its generations are replayed, everything else is
        repeated. Wrap anything random, and anything that must not be repeated, such as a payment.
        `effect` is repeated only if the process dies after it and before its value is recorded.

        Args:
            key: unique in the loop's run.
            effect: plain or async function without arguments. It returns plain data: None, numbers,
                text, bytes, lists and dictionaries; tuples come back as lists.

        Raises:
            RolloutError: the value is not plain data, or two calls used the key at the same time.
        """
        recorded = await self._call("recall", key)
        if recorded:
            return recorded[0]
        value = effect()
        if inspect.isawaitable(value):
            value = await value
        await self._call("keep", key, value)
        return value


class AgentLoop:
    """A user's agent loop, `module:function`. Raises ConfigError if it is not a
    fitting async function."""

    def __init__(self, target: str, thread: UserThread) -> None:
        self.target = target
        self._function = load_function(target, "rollout.agent")
        setting = f"rollout.agent {target!r}"
        check_call(self._function, setting, positional=["ctx", "sample"], keywords=[])
        if not is_async(inspect.unwrap(self._function)):
            name = target.partition(":")[2]
            raise ConfigError(f"{setting}: {name} is not async; write `async def {name}`")
        self._thread = thread

    async def run(
        self, context: AgentContext, sample_id: str, deadline: ExtendableDeadline
    ) -> float | None:
        """Runs the loop once; returns the reward it gives, if any."""
        try:
            async with deadline:
                deadline.start()
                return await self._thread.run_async(
                    lambda: self._reward(context, sample_id), sample_id
                )
        except (RewardError, asyncio.CancelledError):
            raise
        except BaseException as error:  # user code may raise anything
            if deadline.expired:
                raise RolloutError(
                    f"agent loop {self.target} took longer than {deadline.limit_s:.3g} s for "
                    f"sample {sample_id}; give its tools deadlines or raise agent_timeout_s"
                ) from None
            raise RolloutError(
                f"agent loop {self.target} raised {describe(error)} for sample {sample_id}"
                f"{advice(error, _CATCH)}"
            ) from error

    async def _reward(self, context: AgentContext, sample_id: str) -> float | None:
        """Runs on the user thread, because the value's `__float__` is user code, too."""
        result = await self._function(context, context.sample)
        if result is None:
            return None
        return reward_value(result, f"agent loop {self.target}", sample_id, _NO_NUMBER)
