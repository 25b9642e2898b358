"""One sample: its prompt, its completion so far, and the version of the weights behind each token.

Letters: P prompt tokens, C completion tokens (generated, and in agent loops also given ones).

    PENDING -> RUNNING -> FINISHED
                 |  ^
                 v  |      interrupted by a sync, a sleep or the death of its engine; resumed from
               PARTIAL     prompt + completion so far
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.token_store import Segment, TokenStore
from umbra.runtime.rollout.prompts import Prompt
from umbra.runtime.rollout.rollout_config import SamplingOptions

NOT_GENERATED: Final = -1  # in place of a version: the token was given, not sampled
_NO_TOKENS: Final = np.empty(0, np.int32)
_NO_PARTS: Final[Mapping[str, float]] = MappingProxyType({})
_NO_LOGPROBS: Final = np.empty(0, np.float32)


class Trajectory:
    """One sample of a group. Owned by the manager; grows by whole runs of tokens.

    While an engine works on it, its new tokens are in a row of the dispatcher's `TokenStore`, with
    those of all others (`begin_attempt`); afterwards they are here (`settle`).

    Args:
        sample_id: unique in the job, such as `e0/prompt7/3`.
        seed: token i of the completion is drawn with (seed, i) on every engine, so resuming does
            not change the random stream.
        budget: most tokens that may be generated, over all turns and resumptions.
        max_context_len: most tokens of prompt and completion together.
    """

    __slots__ = (
        "_logprobs",
        "_num_settled",
        "_row",
        "_segments",
        "_store",
        "_tokens",
        "budget",
        "finish_reason",
        "is_finished",
        "is_recorded_running",
        "last_engine",
        "max_context_len",
        "num_interruptions",
        "num_refilled_tokens",
        "prompt",
        "prompt_tokens",
        "reward",
        "reward_parts",
        "sample_id",
        "seed",
        "teacher_logprobs",
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
        self.uid = -1  # its number in the ledger; -1: it is not recorded
        self.is_recorded_running = False  # the state that was recorded last
        self.reward: float | None = None
        self.reward_parts: Mapping[str, float] = _NO_PARTS  # NaN where one does not apply
        self.teacher_logprobs: NDArray[np.float32] | None = None  # [C], once the teacher has them
        self.last_engine: EngineId | None = None
        self.num_interruptions = 0
        self.num_refilled_tokens = 0  # prefilled again because of interruptions
        self._store: TokenStore | None = None
        self._row = 0
        self.reset()

    def reset(self) -> None:
        """Restores the bare prompt, for an agent loop that starts over."""
        assert self._store is None, f"{self.sample_id} is with an engine"
        self.is_finished = False
        self.finish_reason = ""
        self.prompt_tokens: NDArray[np.int32] = self.prompt.tokens  # [P]
        self._tokens: NDArray[np.int32] = _NO_TOKENS
        self._logprobs: NDArray[np.float32] = _NO_LOGPROBS
        self._segments: tuple[Segment, ...] = ()
        self._num_settled = 0  # generated tokens in `_tokens`

    def __len__(self) -> int:
        return len(self.prompt_tokens) + self.completion_len

    @property
    def completion_len(self) -> int:
        return len(self._tokens) if self._store is None else self._store.length(self._row)

    @property
    def num_unsettled(self) -> int:
        return 0 if self._store is None else self._store.length(self._row) - len(self._tokens)

    @property
    def num_generated(self) -> int:
        """Sampled tokens of the completion; given ones do not count."""
        return self._num_settled + self.num_unsettled

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[C] the completion; not to be written to."""
        if self._store is None:
            return self._tokens
        return np.concatenate([self._tokens, self._store.read(self._row)[0]])

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[C] of the sampling distribution; 0 where not generated. Not to be written to."""
        if self._store is None:
            return self._logprobs
        return np.concatenate([self._logprobs, self._store.read(self._row)[1]])

    @property
    def versions(self) -> NDArray[np.int64]:
        """[C] of the weights; NOT_GENERATED where not generated."""
        segments = self.segments()
        lengths = np.asarray([s.stop - s.start for s in segments], np.int64)
        return np.repeat(np.asarray([s.version for s in segments], np.int64), lengths)

    def last_token(self) -> int:
        if self.num_unsettled and self._store is not None:
            return self._store.last_token(self._row)
        return int(self._tokens[-1])

    def context(self) -> NDArray[np.int32]:
        """[P + C] all tokens, which the next generation continues; not to be written to."""
        if self.completion_len == 0:
            return self.prompt_tokens
        return np.concatenate([self.prompt_tokens, self.tokens])

    def num_tokens_left(self) -> int:
        """By budget and by context."""
        return max(0, min(self.budget - self.num_generated, self.max_context_len - len(self)))

    def missing_before(self, position: int) -> int:
        """Tokens lost before a run at `position`: positive is a gap, negative a repeat."""
        return position - self.completion_len

    def append_generated(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Appends a run of sampled tokens of one version. Raises RolloutError if it
        exceeds a limit."""
        if len(tokens) > self.num_tokens_left():
            raise RolloutError(
                f"{self.sample_id}: {len(tokens)} tokens, room for {self.num_tokens_left()}"
            )
        if self._store is not None:
            self._store.append(self._row, tokens, logprobs, version)
            return
        segment = Segment(len(self._tokens), len(self._tokens) + len(tokens), version)
        self._add(tokens, logprobs, [segment])
        self._num_settled += len(tokens)

    def append_runs(
        self,
        runs: Iterable[Segment],
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Appends runs of a recorded completion, generated and given ones."""
        for start, stop, version in runs:
            if version == NOT_GENERATED:
                self.extend_context(np.concatenate([self.context(), tokens[start:stop]]))
            else:
                self.append_generated(tokens[start:stop], logprobs[start:stop], version)

    def begin_attempt(self, store: TokenStore, row: int) -> None:
        """Puts new tokens into a row of `store` until `settle`."""
        assert self._store is None, f"{self.sample_id} is with an engine already"
        self._store, self._row = store, row

    def settle(self) -> int:
        """Ends the attempt: copies and counts its tokens, before its row is freed."""
        store, num_tokens = self._store, self.num_unsettled
        self._store = None
        if store is not None and num_tokens:
            self._add(*store.read(self._row), store.segments(self._row))
            self._num_settled += num_tokens
        return num_tokens

    def extend_context(self, context: NDArray[np.int32]) -> None:
        """Appends the given tokens of an agent loop's next context, which begins with all so far.
        Before the first generation the context replaces the prompt. Raises RolloutError if it does
        not begin with the tokens so far."""
        assert self._store is None, f"{self.sample_id} is with an engine"
        if len(self._tokens) == 0:
            self.prompt_tokens = context.copy()
            return
        known = self.context()
        shared = min(len(known), len(context))
        differs = np.flatnonzero(known[:shared] != context[:shared])
        if len(differs) or len(context) < len(known):
            at = int(differs[0]) if len(differs) else len(context)
            raise RolloutError(
                f"{self.sample_id}: the tokens given to generate() differ from the trajectory at "
                f"position {at} of {len(known)}: append each turn's tokens to the earlier ones and "
                "never tokenize the text again"
            )
        given = context[len(known) :]
        segment = Segment(len(self._tokens), len(self._tokens) + len(given), NOT_GENERATED)
        self._add(given, np.zeros(len(given), np.float32), [segment])

    def finish(self, reason: str) -> None:
        self.is_finished = True
        self.finish_reason = reason

    def cut(self) -> None:
        """Marks its generation as interrupted; all tokens stay."""
        self.num_interruptions += 1
        if self.num_generated:  # else nothing of it was computed, or its prompt alone
            self.num_refilled_tokens += len(self)

    def segments(self) -> list[Segment]:
        if self._store is None:
            return list(self._segments)
        return _joined(self._segments, self._store.segments(self._row))

    def _add(
        self,
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        segments: Sequence[Segment],
    ) -> None:
        if len(tokens):
            self._tokens = np.concatenate([self._tokens, tokens])
            self._logprobs = np.concatenate([self._logprobs, logprobs])
            self._segments = tuple(_joined(self._segments, segments))


def _joined(first: Sequence[Segment], then: Sequence[Segment]) -> list[Segment]:
    """All segments in order; the two in the middle become one if they are of one version."""
    if first and then and first[-1].version == then[0].version:
        middle = Segment(first[-1].start, then[0].stop, then[0].version)
        return [*first[:-1], middle, *then[1:]]
    return [*first, *then]


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """One generation of a trajectory. It may take several engines.

    Attributes:
        group: its engine may have the prompt cached; None if the prompt is not shared.
        start, limit: completion length when the generation began, and the largest allowed.
        is_stopped: its tokens contain one of the dispatcher's stop texts.
        on_end: called once, with "stop" or "length"; never after `Dispatcher.cancel`.
        lora: name of the pool's adapter to generate with; "" for the model as it is.
        forced: the tokens from `start` on, if they are given and their logprobs wanted; else None.
        on_error: called instead of `on_end` if the turn fails for good; None: the dispatcher's
            owner gets the error.
        request_id: of the attempt in progress. Each attempt has a new one, so that late deltas of
            an earlier attempt are recognised.
        charged: tokens that the router was charged for the attempt.
        engine: has the attempt in progress; None while there is none.
        row: of the attempt in the dispatcher's `TokenStore`.
        has_grown: the last attempt brought tokens.
        num_errors: attempts that engines failed since the last token.
        failed_by: the last engine that failed an attempt.
        is_cancelled: the turn was given to `Dispatcher.cancel`, maybe by another turn's callback.
    """

    trajectory: Trajectory
    group: Group | None
    start: int
    limit: int
    sampling: SamplingOptions
    on_end: Callable[[Turn, str], None]
    on_error: Callable[[UmbraError], None] | None = None
    lora: str = ""
    forced: NDArray[np.int32] | None = None
    is_stopped: bool = False
    request_id: int = 0
    charged: int = 0
    engine: EngineId | None = None
    row: int = 0
    has_grown: bool = False
    num_errors: int = 0
    failed_by: EngineId | None = None
    is_cancelled: bool = False

    def num_tokens_left(self) -> int:
        return min(self.limit - self.trajectory.completion_len, self.trajectory.num_tokens_left())

    def outcome(self) -> str:
        """ "stop" or "length" once complete, else "".

        The tokens decide, not the engine's report: an engine may die between its last token and the
        report that the request is finished.
        """
        trajectory = self.trajectory
        has_tokens = trajectory.completion_len > self.start
        if self.is_stopped or (
            has_tokens and trajectory.last_token() in self.sampling.stop_token_ids
        ):
            return "stop"
        return "" if self.num_tokens_left() > 0 else "length"

    @property
    def unspent(self) -> int:
        """Tokens of the router's charge that were not produced yet."""
        return self.charged - self.trajectory.num_unsettled

    @property
    def has_begun(self) -> bool:
        return self.trajectory.num_unsettled > 0

    def cost(self) -> int:
        """Tokens that an engine may have to process: context and remaining budget."""
        return len(self.trajectory) + self.num_tokens_left()

    def request(self) -> dict[str, Any]:
        request: dict[str, Any] = {
            "id": self.request_id,
            "tokens": self.trajectory.context(),
            "position": self.trajectory.completion_len,
            "seed": self.trajectory.seed,
            "max_new_tokens": self.num_tokens_left(),
            **self.sampling.request_fields(),
        }
        if self.forced is not None:
            request["forced"] = self.forced[self.trajectory.completion_len - self.start :]
        return request | {"lora": self.lora} if self.lora else request


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The tokens that training on a group has to compute. `prompt_len` is 0 if the samples do not
    share a prompt; `lengths` counts tokens beyond it."""

    prompt_len: int
    lengths: Sequence[int]


class Group:
    """Trajectories that are scored together and delivered whole: those of one prompt, in
    evaluations of several.

    Args:
        group_id: unique in the job, such as `e0/prompt7`.
        order_idx: index in the endless order of prompts; -1 in evaluations.
        parts: names of the parts of rewards that advantages compare apart; none for the rewards.
    """

    __slots__ = ("group_id", "last_engine", "num_open", "order_idx", "parts", "trajectories")

    def __init__(
        self,
        group_id: str,
        trajectories: Sequence[Trajectory],
        order_idx: int = -1,
        parts: Sequence[str] = (),
    ) -> None:
        self.group_id = group_id
        self.parts = parts
        self.order_idx = order_idx
        self.trajectories = list(trajectories)
        self.num_open = len(self.trajectories)  # trajectories that are still being generated
        self.last_engine: EngineId | None = None  # may have the prompt cached

    @property
    def unscored(self) -> list[Trajectory]:
        """The trajectories without a reward yet; an agent loop may have set its own."""
        return [sample for sample in self.trajectories if sample.reward is None]

    @property
    def has_tokens(self) -> bool:
        return any(sample.num_generated for sample in self.trajectories)

    @property
    def rewards(self) -> NDArray[np.float32]:
        """[G]; every trajectory must have been scored."""
        return np.asarray([sample.reward for sample in self.trajectories], np.float32)

    @property
    def compared_rewards(self) -> NDArray[np.float32]:
        """[K, G], what advantages compare: each of the K parts, NaN where it does not apply, or the
        rewards as the only row."""
        if not self.parts:
            return self.rewards[np.newaxis]
        of_samples = [sample.reward_parts for sample in self.trajectories]
        return np.asarray(
            [[of_one[part] for of_one in of_samples] for part in self.parts], np.float32
        )

    def shape(self) -> GroupShape:
        """Agent loops may have given samples prompts of their own."""
        prompt = self.trajectories[0].prompt_tokens
        if all(np.array_equal(sample.prompt_tokens, prompt) for sample in self.trajectories):
            return GroupShape(len(prompt), [sample.completion_len for sample in self.trajectories])
        return GroupShape(0, [len(sample) for sample in self.trajectories])

    @property
    def has_zero_variance(self) -> bool:
        """All rewards that are compared are equal: there is nothing to learn from the group."""
        rows = self.compared_rewards
        return all(len(np.unique(row[~np.isnan(row)])) <= 1 for row in rows)


def tokens_by_version(groups: Iterable[Group]) -> Counter[int]:
    """How many tokens each version of the weights has generated."""
    found: Counter[int] = Counter()
    for group in groups:
        for sample in group.trajectories:
            for segment in sample.segments():
                if segment.version != NOT_GENERATED:
                    found[segment.version] += segment.stop - segment.start
    return found
