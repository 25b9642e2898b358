"""The decisions of a node's supervisor when ranks, nodes and actors come and go. Pure: no clock,
task or socket.

running ── a stop signal, or a request to stop ──▶ stopping ── the last rank has left ──▶ over
   │  ▲                                               └─ another signal, a while later ──▶ over
   │  └── torchrun has started the ranks again
   └── the last rank has left
         ├─ done or stopped for good, or torchrun starts none after a failure ───────────▶ over
         └─ else torchrun may start ranks here: none has come in time ───────────────────▶ over
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.cluster.run_requests import PREEMPT_SIGNAL
from umbra.runtime.engine_api.engine_names import FOLLOWER_TARGET

STOP_WINDOW_S: Final = 1.0
"""Longest time between the first and the last process receiving the same stop. A longer window
delays the restart of an actor that was signalled alone; a shorter one mistakes a slow stop for
many failures."""


class StopDecision(StrEnum):
    """The effect of a stop signal."""

    STOP_RANKS = "stop_ranks"
    END = "end"  # without waiting for them
    IGNORE = "ignore"


class AfterRanks(StrEnum):
    """The actors' fate when a node's last rank has left."""

    OVER = "over"
    KEEP = "keep"  # all actors, for ranks that torchrun starts here
    KEEP_ENGINES = "keep_engines"  # for a while: this node may be cut off


class RuledActor(Protocol):
    """A `SupervisedActor`, as far as decisions depend on it."""

    spec: ActorSpec

    @property
    def is_running(self) -> bool: ...


class JobRules:
    """Owned by the supervisor.

    Args:
        nodes_may_change: whether torchrun may start the ranks again on other nodes.

    Attributes:
        has_epochs: whether each start of the ranks begins an epoch, with its own nodes, lead and
            pools. Otherwise all of these stay as they are until the job ends.
        may_restart: whether torchrun would start failed ranks again.
        is_for_good: whether the job was stopped by a request, which ends torchrun, too.
    """

    def __init__(self, *, nodes_may_change: bool) -> None:
        self.has_epochs = nodes_may_change
        self.may_restart = False
        self.is_for_good = False
        self._stopped_at: float | None = None
        self._has_lost_node = False  # in this epoch

    @property
    def is_stopping(self) -> bool:
        return self._stopped_at is not None

    def start_over(self) -> None:
        """The ranks were started again: the job continues."""
        self._stopped_at = None

    def begin_epoch(self) -> None:
        """The nodes meet, so nodes lost earlier no longer count."""
        self._has_lost_node = False

    def lose_node(self) -> bool:
        """Another node with ranks cannot be reached. Returns whether the job may continue without
        it, once torchrun has started the ranks again."""
        self._has_lost_node = self.has_epochs
        return self.has_epochs

    def request_must_wait(self, *, has_met: bool, has_ranks: bool) -> bool:
        """Whether a request waits until the nodes have met again: only then is the lead known."""
        return self.has_epochs and not (has_met and has_ranks)

    def outlives_ranks(self, actor: RuledActor) -> bool:
        """Whether ranks that are started again can use it."""
        return self.outlives_pools(actor) if self.has_epochs else actor.spec.role == "engine"

    def outlives_pools(self, actor: RuledActor) -> bool:
        """Whether another epoch's pools can use it: an engine that can be brought to rest, on one
        node, with the trainer's weights."""
        spec = actor.spec
        if spec.role != "engine" or spec.target == FOLLOWER_TARGET or spec.kwargs.get("followers"):
            return False
        return self.has_epochs and actor.is_running and not spec.kwargs.get("load_weights")

    def stop(self, number: int, now: float) -> StopDecision:
        """Takes a stop signal or request. One stop may be several signals within
        `STOP_WINDOW_S`."""
        if self._stopped_at is not None and now - self._stopped_at > STOP_WINDOW_S:
            is_preemption = number == PREEMPT_SIGNAL
            return StopDecision.IGNORE if is_preemption else StopDecision.END
        self._stopped_at = now if self._stopped_at is None else self._stopped_at
        return StopDecision.STOP_RANKS

    def is_preempted(self, number: int, *, is_first_signal: bool, has_failed: bool) -> bool:
        """Whether the launcher must start the job again: after a preemption, even if its ranks have
        failed and would have been started again."""
        prevents_restart = has_failed and self.may_restart
        return number == PREEMPT_SIGNAL and (is_first_signal or prevents_restart)

    def after_last_rank(
        self, *, has_failed: bool, was_stopped: bool, have_all_detached: bool
    ) -> AfterRanks:
        """Decides when this node's last rank has left.

        Args:
            was_stopped: the ranks got a stop signal.
            have_all_detached: every rank announced that it leaves.
        """
        if self.is_for_good or self.is_stopping:
            is_over = True
        elif has_failed:
            is_over = not self.may_restart
        elif self.has_epochs and was_stopped:
            is_over = False  # torchrun stops ranks so, to start them again with another node
        else:
            is_over = have_all_detached
        if is_over:
            return AfterRanks.OVER
        return AfterRanks.KEEP_ENGINES if self.has_epochs else AfterRanks.KEEP

    @property
    def ends_torchrun(self) -> bool:
        """Whether torchrun would restart the ranks of a job that was stopped for good."""
        return self.is_for_good and self.may_restart

    def may_forget_keys(self, *, has_failed: bool) -> bool:
        """Whether no other node continues with the job's keys, as after a stop, failure
        or cut-off here."""
        return not (self._has_lost_node or has_failed or self.is_stopping)
