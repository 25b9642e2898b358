from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rpc.rpc_client import Handle

_RESOLVE_TIMEOUT_S: Final = 60.0
"""Deadline for the generator to be found, which started before the ranks asked for a batch."""


class Teacher:
    """Asks the teacher's pool for the logprobs of finished completions, while others are generated.

    A question survives the deaths of the pool's engines and of its generator. One that gets no
    answer in time ends the job.

    Args:
        generator: name of the pool's `GeneratorService`.
        timeout_s: deadline of one answer.
        on_failure: called with an error that ends the job.
    """

    def __init__(
        self,
        generator: str,
        timeout_s: float,
        context: ActorContext,
        on_failure: Callable[[UmbraError], None],
    ) -> None:
        self._generator = generator
        self._timeout_s = timeout_s
        self._context = context
        self._on_failure = on_failure
        # Bounded by what the manager admits: one question for each trajectory.
        self._waiting: dict[Trajectory, Callable[[NDArray[np.float32]], None]] = {}
        self._has_waiting = asyncio.Event()
        self._asked: dict[Trajectory, asyncio.Task[None]] = {}

    def ask(self, sample: Trajectory, on_answer: Callable[[NDArray[np.float32]], None]) -> None:
        """Calls `on_answer` with [C] logprobs of a finished trajectory's completion."""
        self._waiting[sample] = on_answer
        self._has_waiting.set()

    def withdraw(self, samples: Iterable[Trajectory]) -> None:
        """Spares the teacher questions whose answers nobody needs."""
        for sample in samples:
            self._waiting.pop(sample, None)
            if task := self._asked.get(sample):
                task.cancel()

    async def run(self) -> None:
        """Asks until cancelled."""
        try:
            ref = await self._context.resolve(self._generator, _RESOLVE_TIMEOUT_S)
        except UmbraError as error:
            self._on_failure(RolloutError(f"the teacher cannot be asked: {error}"))
            return
        handle = self._context.connect(ref)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._has_waiting.wait()
                self._has_waiting.clear()
                for sample, on_answer in self._waiting.items():
                    task = tasks.create_task(self._answer(handle, sample, on_answer))
                    self._asked[sample] = task
                    task.add_done_callback(lambda _task, done=sample: self._asked.pop(done, None))
                self._waiting.clear()

    async def _answer(
        self,
        handle: Handle,
        sample: Trajectory,
        on_answer: Callable[[NDArray[np.float32]], None],
    ) -> None:
        prompt, completion = sample.prompt_tokens, sample.tokens
        try:
            logprobs = await handle.call(
                "score",
                np.ascontiguousarray(prompt),
                np.ascontiguousarray(completion),
                timeout_s=self._timeout_s,
            )
        except UmbraError as error:
            self._on_failure(RolloutError(f"the teacher did not score {sample.sample_id}: {error}"))
        else:
            on_answer(logprobs)
