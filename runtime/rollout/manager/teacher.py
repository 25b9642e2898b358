"""A teacher's logprobs of finished completions.

GroupRunner ──ask──▶ Teacher ──▶ PoolScorer ──▶ engines of [pools.teacher]
                            └──▶ PolicyScorer ─▶ the policy's own, with another prompt
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.actor.actor_spec import ActorContext
from umbra.runtime.errors import DeadlineExceeded, RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.trajectory import Trajectory, Turn
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import SamplingOptions
from umbra.runtime.rpc.rpc_client import Handle

_RESOLVE_TIMEOUT_S: Final = 60.0
"""Deadline for the generator to be found, which started before the ranks asked for a batch."""


def teacher_prompt(sample: Trajectory, successes: Sequence[Trajectory]) -> NDArray[np.int32] | None:
    """The prompt that the teacher gets in place of the sample's. None if it shows a successful
    completion of the group, and `successes`, the first two of them, have none but the sample."""
    first, *others = sample.prompt.teacher or (sample.prompt_tokens,)
    if not others:
        return first
    peer = next((peer for peer in successes if peer is not sample), None)
    if peer is None:
        return None
    shown = peer.tokens[:-1] if peer.finish_reason == "stop" else peer.tokens
    return np.concatenate([first, *(part for other in others for part in (shown, other))])


class Scorer(Protocol):
    async def score(
        self, prompt: NDArray[np.int32], completion: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Logprobs [C] of the tokens of a completion. Raises UmbraError if there will be none."""
        ...


class PoolScorer:
    """Asks the generator of another pool, and asks again when that has died."""

    def __init__(self, generator: str, context: ActorContext, timeout_s: float) -> None:
        self._generator = generator  # name of its `GeneratorService`
        self._context = context
        self._timeout_s = timeout_s
        self._handle: Handle | None = None

    async def score(
        self, prompt: NDArray[np.int32], completion: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        if self._handle is None:
            ref = await self._context.resolve(self._generator, _RESOLVE_TIMEOUT_S)
            self._handle = self._context.connect(ref)
        return await self._handle.call("score", prompt, completion, timeout_s=self._timeout_s)


class PolicyScorer:
    """Asks the policy's engines, before their waiting requests."""

    def __init__(self, dispatcher: Dispatcher, max_context_len: int, timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._max_context_len = max_context_len
        self._timeout_s = timeout_s

    async def score(
        self, prompt: NDArray[np.int32], completion: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        name, num_tokens = "a question to the teacher", len(completion)
        asked = Trajectory(
            name,
            Prompt(name, "", prompt, {}),
            seed=0,
            budget=num_tokens,
            max_context_len=self._max_context_len,
        )
        answer: asyncio.Future[NDArray[np.float32]] = asyncio.get_running_loop().create_future()

        def on_end(_turn: Turn, _reason: str) -> None:
            if not answer.done():
                answer.set_result(asked.logprobs)

        def on_error(error: UmbraError) -> None:
            if not answer.done():
                answer.set_exception(error)

        turn = Turn(
            trajectory=asked,
            group=None,
            start=0,
            limit=num_tokens,
            sampling=SamplingOptions(temperature=1.0),
            on_end=on_end,
            on_error=on_error,
            forced=completion,
        )
        try:
            self._dispatcher.submit(turn)
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {self._timeout_s:.3g} s") from None
        finally:
            self._dispatcher.cancel([turn])  # of a group that was abandoned


_Question = tuple[NDArray[np.int32], Callable[[NDArray[np.float32]], None]]


class Teacher:
    """Asks about finished completions while others are generated. A question survives the deaths of
    engines; one that cannot be answered ends the job, by `on_failure`."""

    def __init__(self, scorer: Scorer, on_failure: Callable[[UmbraError], None]) -> None:
        self._scorer = scorer
        self._on_failure = on_failure
        # Bounded by what the manager admits: one question for each trajectory.
        self._waiting: dict[Trajectory, _Question] = {}
        self._has_waiting = asyncio.Event()
        self._asked: dict[Trajectory, asyncio.Task[None]] = {}

    def ask(
        self,
        sample: Trajectory,
        prompt: NDArray[np.int32],
        on_answer: Callable[[NDArray[np.float32]], None],
    ) -> None:
        """Calls `on_answer` with [C] logprobs of a finished trajectory's completion of `prompt`."""
        self._waiting[sample] = prompt, on_answer
        self._has_waiting.set()

    def withdraw(self, samples: Iterable[Trajectory]) -> None:
        """Spares the teacher questions whose answers nobody needs."""
        for sample in samples:
            self._waiting.pop(sample, None)
            if task := self._asked.get(sample):
                task.cancel()

    async def run(self) -> None:
        """Asks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._has_waiting.wait()
                self._has_waiting.clear()
                for sample, question in self._waiting.items():
                    task = tasks.create_task(self._answer(sample, *question))
                    self._asked[sample] = task
                    task.add_done_callback(lambda _task, done=sample: self._asked.pop(done, None))
                self._waiting.clear()

    async def _answer(
        self,
        sample: Trajectory,
        prompt: NDArray[np.int32],
        on_answer: Callable[[NDArray[np.float32]], None],
    ) -> None:
        try:
            logprobs = await self._scorer.score(
                np.ascontiguousarray(prompt), np.ascontiguousarray(sample.tokens)
            )
        except UmbraError as error:
            self._on_failure(RolloutError(f"the teacher did not score {sample.sample_id}: {error}"))
        else:
            on_answer(logprobs)
