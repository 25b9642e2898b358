"""One sample: prompt, completion so far, and which version of the weights made each token.

Letters: P prompt tokens, C completion tokens (generated, and in agent loops also given ones).

    PENDING -> RUNNING -> FINISHED
                 |  ^
                 v  |      cut by a sync, a sleep or the death of its engine; resumed from
               PARTIAL     prompt + completion so far
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import RolloutError
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.router import EngineId

T = TypeVar("T", bound=np.generic)

NOT_GENERATED: Final = -1  # stands for a version where a token was given, not sampled
# First allocation of a completion. Trajectories mostly wait in line, so start small and double.
_INITIAL_CAPACITY: Final = 32


class TrajectoryState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    PARTIAL = "partial"
    FINISHED = "finished"


class Segment(NamedTuple):
    """A run of completion tokens made under one version (NOT_GENERATED: given tokens)."""

    start: int
    stop: int
    version: int


class Trajectory:
    """One sample of a group. Owned by the manager; grows by whole runs of tokens.

    Args:
        sample_id: unique in the job, such as `e0/prompt7/3`.
        seed: its sampling seed. Token i of the completion is drawn with (seed, i), whichever
            engine draws it, so that resuming does not change the stream.
        budget: most tokens that may be generated, over all turns and resumptions.
        max_context_len: most tokens of prompt and completion together.
    """

    __slots__ = (
        "_length",
        "_logprobs",
        "_tokens",
        "_versions",
        "budget",
        "finish_reason",
        "home",
        "is_recorded_running",
        "max_context_len",
        "num_generated",
        "num_interruptions",
        "num_refilled_tokens",
        "prompt",
        "prompt_tokens",
        "reward",
        "sample_id",
        "seed",
        "state",
        "uid",
    )

    def __init__(
        self, sample_id: str, prompt: Prompt, seed: int, *, budget: int, max_context_len: int
    ) -> None:
        self.sample_id = sample_id
        self.prompt = prompt
        self.seed = seed
        self.budget = budget
        self.max_context_len = max_context_len
        self.uid = -1  # in the ledger; -1: it is not recorded
        self.is_recorded_running = False  # what the ledger was told last
        self.reward: float | None = None
        self.home: EngineId | None = None  # the engine that generated last
        self.num_interruptions = 0
        self.num_refilled_tokens = 0  # prefilled again because of interruptions
        self.reset()

    def reset(self) -> None:
        """Back to the bare prompt; an agent loop whose process died starts over."""
        self.state = TrajectoryState.PENDING
        self.finish_reason = ""
        self.prompt_tokens: NDArray[np.int32] = self.prompt.tokens  # [P]
        self.num_generated = 0
        self._length = 0
        self._tokens = np.empty(_INITIAL_CAPACITY, np.int32)
        self._logprobs = np.empty(_INITIAL_CAPACITY, np.float32)
        self._versions = np.empty(_INITIAL_CAPACITY, np.int64)

    @property
    def is_finished(self) -> bool:
        return self.state == TrajectoryState.FINISHED

    def __len__(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_tokens) + self._length

    @property
    def completion_len(self) -> int:
        return self._length

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[C] the completion."""
        return self._tokens[: self._length]

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[C] of the sampling distribution; 0 where not generated."""
        return self._logprobs[: self._length]

    @property
    def versions(self) -> NDArray[np.int64]:
        """[C] of the weights; NOT_GENERATED where not generated."""
        return self._versions[: self._length]

    def context(self) -> NDArray[np.int32]:
        """[P + C] a copy of all tokens, to go on from."""
        return np.concatenate([self.prompt_tokens, self.tokens])

    def room(self) -> int:
        """Tokens that may still be generated, by budget and by context."""
        return max(0, min(self.budget - self.num_generated, self.max_context_len - len(self)))

    def missing_before(self, position: int) -> int:
        """Tokens lost before a run at `position`: positive is a gap, negative a repeat."""
        return position - self._length

    def append_generated(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Appends a run of sampled tokens, made under one version.

        Raises:
            RolloutError: more than `room()`: the budget is never exceeded.
        """
        if len(tokens) > self.room():
            raise RolloutError(f"{self.sample_id}: {len(tokens)} tokens, room for {self.room()}")
        self._append(tokens, logprobs, version)
        self.num_generated += len(tokens)

    def extend_context(self, context: NDArray[np.int32]) -> None:
        """An agent loop's next context: what is there so far, plus tokens that it appends.

        Before the first generation the context replaces the prompt.

        Raises:
            RolloutError: `context` does not start with the tokens so far.
        """
        if self._length == 0:
            self.prompt_tokens = context.copy()
            return
        known = self.context()
        shared = min(len(known), len(context))
        differs = np.flatnonzero(known[:shared] != context[:shared])
        if len(differs) or len(context) < len(known):
            at = int(differs[0]) if len(differs) else len(context)
            raise RolloutError(
                f"{self.sample_id}: the tokens given to generate() leave the trajectory at "
                f"position {at} of {len(known)}: append each turn's tokens to those before and "
                "never tokenise the text anew"
            )
        given = context[len(known) :]
        self._append(given, np.zeros(len(given), np.float32), NOT_GENERATED)

    def finish(self, reason: str) -> None:
        self.state = TrajectoryState.FINISHED
        self.finish_reason = reason

    def cut(self) -> None:
        """Its generation was interrupted; all that is here stays."""
        self.num_interruptions += 1
        self.num_refilled_tokens += len(self)
        self.state = TrajectoryState.PARTIAL

    def segments(self) -> list[Segment]:
        """The completion as runs of equal version, in order."""
        if self._length == 0:
            return []
        edges = np.flatnonzero(np.diff(self.versions)) + 1
        bounds = [0, *edges.tolist(), self._length]
        return [
            Segment(start, stop, int(self._versions[start])) for start, stop in pairwise(bounds)
        ]

    def _append(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], version: int
    ) -> None:
        start, stop = self._length, self._length + len(tokens)
        if stop > len(self._tokens):
            capacity = max(stop, 2 * len(self._tokens))
            self._tokens = _grown(self._tokens, capacity)
            self._logprobs = _grown(self._logprobs, capacity)
            self._versions = _grown(self._versions, capacity)
        self._tokens[start:stop] = tokens
        self._logprobs[start:stop] = logprobs
        self._versions[start:stop] = version
        self._length = stop


def _grown(array: NDArray[T], capacity: int) -> NDArray[T]:
    larger = np.empty(capacity, array.dtype)
    larger[: len(array)] = array
    return larger
