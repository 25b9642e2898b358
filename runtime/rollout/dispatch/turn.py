"""One generation of a trajectory: what the manager asks of engines until it is complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.trajectory import Trajectory


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """A generation, over however many engines it takes.

    Attributes:
        trajectory: grows by it.
        group: where its prompt may be cached; None where nothing is shared.
        start, limit: completion lengths at which it began and beyond which it must not go.
        temperature: 0 is greedy.
        stop_token_ids: it ends after any of these.
        on_end: told once, with "stop" or "length"; never after `Dispatcher.cancel`.
        lora: name of the pool's adapter to generate with; "" for the model as it is.
        on_error: told instead, of an error that no other engine heals. None: it is the error of
            whoever owns the dispatcher.
        request_id: of the attempt in progress; each attempt has its own, so that late deltas
            of an earlier one are recognised.
        charged: tokens that the router was charged for the attempt.
        engine: that has the attempt in progress; None while there is none.
        row: of the attempt in the dispatcher's `TokenStore`.
        num_errors: attempts that engines failed since the last token.
    """

    trajectory: Trajectory
    group: Group | None
    start: int
    limit: int
    temperature: float
    stop_token_ids: Sequence[int]
    on_end: Callable[[Turn, str], None]
    on_error: Callable[[UmbraError], None] | None = None
    lora: str = ""
    request_id: int = 0
    charged: int = 0
    engine: EngineId | None = None
    row: int = 0
    num_errors: int = 0

    def room(self) -> int:
        """Tokens it may still generate."""
        return min(self.limit - self.trajectory.completion_len, self.trajectory.room())

    def outcome(self) -> str:
        """ "stop" or "length" once complete, else "".

        Decided by the tokens, not by the engine's word: an engine may die between its last
        token and the news of the finish.
        """
        trajectory = self.trajectory
        has_tokens = trajectory.completion_len > self.start
        if has_tokens and trajectory.last_token() in self.stop_token_ids:
            return "stop"
        return "" if self.room() > 0 else "length"

    @property
    def unspent(self) -> int:
        """What is left of the tokens that the router was charged for the attempt."""
        return self.charged - self.trajectory.num_unsettled

    @property
    def has_begun(self) -> bool:
        """The attempt in progress has produced a token."""
        return self.trajectory.num_unsettled > 0

    def cost(self) -> int:
        """Tokens an engine may have to process: context and remaining budget."""
        return len(self.trajectory) + self.room()

    def request(self) -> dict[str, Any]:
        """The engine protocol's form of what is left to do."""
        request: dict[str, Any] = {
            "id": self.request_id,
            "tokens": self.trajectory.context(),
            "position": self.trajectory.completion_len,
            "seed": self.trajectory.seed,
            "max_new_tokens": self.room(),
            "temperature": self.temperature,
            "stop_token_ids": self.stop_token_ids,
        }
        return request | {"lora": self.lora} if self.lora else request
