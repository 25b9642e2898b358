from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.actor.actor_spec import actor_context, idempotent
from umbra.runtime.rollout.dispatch.generator import GenerationOptions, Generator
from umbra.runtime.rollout.dispatch.operator_messages import OperatorMessages
from umbra.runtime.rollout.rollout_config import DispatchConfig
from umbra.runtime.settings import from_wire


class GeneratorService:
    """A `Generator` as an actor. It keeps no state: after its death callers ask again."""

    def __init__(self, config: dict[str, Any]) -> None:
        dispatch = from_wire(DispatchConfig, config)
        context = actor_context()
        self._operator_messages = OperatorMessages(context)
        self._generator = Generator(dispatch, context, self._operator_messages.put)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._operator_messages.run())
            tasks.create_task(self._generator.run())

    @idempotent
    async def generate(
        self, tokens: NDArray[np.int32], *options: Any, **named: Any
    ) -> dict[str, Any]:
        """{"tokens": int32 [n], "logprobs": float32 [n], "finish_reason"}; options are the fields
        of `GenerationOptions`, in their order or by name."""
        piece = await self._generator.generate(tokens, GenerationOptions(*options, **named))
        return piece._asdict()

    async def stream(
        self, tokens: NDArray[np.int32], *options: Any, **named: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Like `generate`, in pieces as they come; "finish_reason" is "" in all but the last."""
        pieces = self._generator.stream(tokens, GenerationOptions(*options, **named))
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece._asdict()

    @idempotent
    def stats(self) -> dict[str, Any]:
        return {"open": self._generator.num_open, "engines": self._generator.engines()}
