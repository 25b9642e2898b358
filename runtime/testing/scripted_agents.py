"""An agent loop's `ctx` for tests without engines: its models answer from a script.

    ctx = ScriptedContext(sample, ["?", "24"], pools={"judge": ["right"]})
    assert asyncio.run(my_loops.run(ctx, sample)) == 0.5

Everything else works as in a run: a loop that leaves its trajectory gets the same error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.agents.agent_loop import AgentContext
from umbra.runtime.rollout.agents.auxiliary_pool import PoolAnswer
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.text.messages import normal_messages

_ID: Final = "scripted"
_MANY: Final = 1 << 20


class ScriptedContext(AgentContext):
    """The context that a loop gets. A token is a character.

    Attributes:
        trajectory: what the loop has made so far, such as its `segments()`.

    Args:
        sample: the data set's row; its "prompt" is the prompt.
        answers: results of `generate`, in order, with or without `lora`; answers longer than the
            requested limit are cut.
        pools: answers of auxiliary pools, by pool name.
        budget: limit on all generated tokens, like `rollout.max_new_tokens`.
    """

    def __init__(
        self,
        sample: Mapping[str, Any],
        answers: Sequence[str],
        *,
        pools: Mapping[str, Sequence[str]] | None = None,
        budget: int = _MANY,
    ) -> None:
        prompt = str(sample["prompt"])
        tokens = _encode(prompt)
        self.trajectory = Trajectory(
            _ID,
            Prompt(_ID, prompt, token_ids(tokens), dict(sample)),
            0,
            budget=budget,
            max_context_len=_MANY,
        )
        self._answers = _script("the policy", answers)
        asked = {name: ScriptedPool(name, replies) for name, replies in (pools or {}).items()}
        self._asked: Mapping[str, Any] = asked
        self._kept: dict[str, Any] = {}
        item = {"row": dict(sample), "prompt": prompt, "tokens": token_ids(tokens)}
        unused: Any = None
        super().__init__(item, unused, unused, self._ask, unused, unused)

    def encode(self, text: str) -> list[int]:
        return _encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        return _encode_chat(messages, **variables)

    def decode(self, tokens: Sequence[int]) -> str:
        return _decode(tokens)

    def pool(self, name: str) -> Any:
        if name not in self._asked:
            known = ", ".join(self._asked)
            raise RolloutError(f"there is no pool {name!r} to ask; there are: {known}")
        return self._asked[name]

    async def _ask(self, method: str, *arguments: Any) -> Any:
        match method:
            case "recall":
                (key,) = arguments
                return [self._kept[key]] if key in self._kept else []
            case "keep":
                key, value = arguments
                self._kept[key] = value
                return None
            case _:
                return self._answer(*arguments)

    def _answer(
        self, context: NDArray[np.int32], max_new_tokens: int | None, lora: str = ""
    ) -> dict[str, Any]:
        trajectory = self.trajectory
        if not lora:
            trajectory.extend_context(context)
        num_left = _MANY if lora else trajectory.num_tokens_left()
        limit = num_left if max_new_tokens is None else min(num_left, max_new_tokens)
        reply = token_ids(_encode(next(self._answers) if limit else ""))
        tokens = reply[:limit]
        if not lora:
            trajectory.append_generated(tokens, np.zeros(len(tokens), np.float32), 0)
        is_cut = not limit or len(reply) > limit
        return {"tokens": tokens, "finish_reason": "length" if is_cut else "stop"}


class ScriptedPool:
    """An auxiliary pool, such as a judge, with the interface of `AuxiliaryPool`."""

    def __init__(self, name: str, answers: Sequence[str]) -> None:
        self.name = name
        self.encode = _encode
        self.decode = _decode
        self._answers = _script(f"the pool {name!r}", answers)

    async def generate(
        self, tokens: Sequence[int], max_new_tokens: int | None = None, **_how: Any
    ) -> PoolAnswer:
        token_ids(tokens)
        reply = _encode(next(self._answers))
        answer = reply[:max_new_tokens]
        return PoolAnswer(
            text=_decode(answer),
            tokens=answer,
            logprobs=[0.0] * len(answer),
            finish_reason="stop" if answer == reply else "length",
        )

    async def complete(
        self, text: str, max_new_tokens: int | None = None, **how: Any
    ) -> PoolAnswer:
        return await self.generate(_encode(text), max_new_tokens, **how)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int | None = None,
        **how: Any,
    ) -> PoolAnswer:
        return await self.generate(_encode_chat(messages, **how), max_new_tokens)


def _script(who: str, answers: Sequence[str]) -> Iterator[str]:
    yield from answers
    raise AssertionError(f"{who} got one more request; the script has {len(answers)} answers")


def _encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def _encode_chat(
    messages: Sequence[object], *, continue_final_message: bool = False, **_variables: Any
) -> list[int]:
    """The contents one after the other: a script has no template."""
    found = normal_messages(messages, continue_final_message=continue_final_message)
    return _encode("".join(message.get("content", "") for message in found))


def _decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))
