from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.trajectory import Trajectory
from umbra.runtime.rollout.sampling_options import SamplingOptions


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """One generation of a trajectory. It may take several engines.

    Attributes:
        group: its engine may have the prompt cached; None if the prompt is not shared.
        start, limit: completion length when the generation began, and the largest allowed.
        is_stopped: its tokens contain one of the dispatcher's stop texts.
        on_end: called once, with "stop" or "length"; never after `Dispatcher.cancel`.
        lora: name of the pool's adapter to generate with; "" for the model as it is.
        on_error: called instead of `on_end`, with an error that no other engine would heal. With
            None, the owner of the dispatcher gets the error.
        request_id: of the attempt in progress; a new one for each tells late deltas apart.
        charged: tokens that the router was charged for the attempt.
        engine: has the attempt in progress; None while there is none.
        row: of the attempt in the dispatcher's `TokenStore`.
        num_errors: attempts that engines failed since the last token.
        is_cancelled: `Dispatcher.cancel` was called with it, maybe from a callback of another turn.
    """

    trajectory: Trajectory
    group: Group | None
    start: int
    limit: int
    sampling: SamplingOptions
    on_end: Callable[[Turn, str], None]
    on_error: Callable[[UmbraError], None] | None = None
    lora: str = ""
    is_stopped: bool = False
    request_id: int = 0
    charged: int = 0
    engine: EngineId | None = None
    row: int = 0
    num_errors: int = 0
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
        return request | {"lora": self.lora} if self.lora else request
