from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.dispatch.turn import Turn
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.sampling_options import SamplingOptions

_SEED_BITS: Final = 63


class SideGenerations:
    """Generations with an adapter, of one run of an agent loop; `close` ends those in progress.
    They are not trained on. Tokens of theirs that the loop appends to its own count as given, like
    a tool's output."""

    def __init__(
        self, dispatcher: Dispatcher, trajectory: Trajectory, sampling: SamplingOptions
    ) -> None:
        self._dispatcher = dispatcher
        self._parent = trajectory
        self._sampling = sampling
        self._open: dict[Turn, asyncio.Future[dict[str, Any]]] = {}

    async def generate(
        self, context: NDArray[np.int32], max_new_tokens: int | None, lora: str
    ) -> dict[str, Any]:
        """Raises RolloutError if the run ends before the generation, or no engine can serve it."""
        answer = asyncio.get_running_loop().create_future()
        turn = self._turn(context, max_new_tokens, lora, answer)
        self._open[turn] = answer
        try:
            self._dispatcher.submit(turn)
            outcome: dict[str, Any] = await answer
            return outcome
        finally:
            del self._open[turn]
            self._dispatcher.cancel([turn])

    def close(self) -> None:
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(RolloutError("this run of the agent loop has ended"))
        self._dispatcher.cancel(self._open)

    def _turn(
        self,
        context: NDArray[np.int32],
        max_new_tokens: int | None,
        lora: str,
        answer: asyncio.Future[dict[str, Any]],
    ) -> Turn:
        parent = self._parent
        name = f"{parent.sample_id} with {lora}"
        budget = max(0, parent.max_context_len - len(context))
        trajectory = Trajectory(
            name,
            Prompt(name, "", context, {}),
            secrets.randbits(_SEED_BITS),
            budget=budget,
            max_context_len=parent.max_context_len,
        )

        def on_end(_turn: Turn, reason: str) -> None:
            if not answer.done():
                answer.set_result({"tokens": trajectory.tokens.copy(), "finish_reason": reason})

        def on_error(error: UmbraError) -> None:
            if not answer.done():
                answer.set_exception(RolloutError(str(error)))

        return Turn(
            trajectory=trajectory,
            group=None,
            start=0,
            limit=budget if max_new_tokens is None else max_new_tokens,
            sampling=self._sampling,
            on_end=on_end,
            on_error=on_error,
            lora=lora,
        )
