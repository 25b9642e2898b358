"""The batches of a rollout manager, for SPMD trainer code on all ranks together.

While `Rollouts` waits for a batch, it also serves catch-up syncs: a restarted engine has no
weights, and the batch may depend on that engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from umbra.runtime.errors import DeadlineExceeded, ProtocolError, RemoteError
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session

ServeSync = Callable[[int], None]

_LEDGER_TIMEOUT_S: Final = 90.0
"""Covers the manager's wait for the disk, and its restart."""
_PROGRESS_TIMEOUT_S: Final = 1.0
"""The manager answers from memory. Nobody needs an old count."""


class Rollouts:
    """Batches from a rollout manager. Every rank has one and makes every call with the others."""

    def __init__(self, session: Session, manager: str, timeout_s: float = 60.0) -> None:
        self._rank = session.rank
        self._manager: SyncHandle = session.actor(manager, timeout_s)

    def begin(self, step: int, version: int, position: str, timeout_s: float) -> Mapping[str, int]:
        """Starts or resumes training from the checkpoint after `step` steps.

        One rank calls it, before the others ask.

        Args:
            version: the newest when the checkpoint was made.
            position: of the ledger, as `position()` returned it for the checkpoint; "" for none.

        Returns {"groups", "tokens", "version"}: groups and tokens that need not be generated again,
        and the newest version that was ever announced.

        Raises:
            LedgerError: the ledger and the checkpoint do not match.
        """
        kept: Mapping[str, int] = self._manager.call(
            "begin", step, version, position, timeout_s=timeout_s
        )
        return kept

    def announce(self, version: int, step: int) -> None:
        """The weights after `step` steps will be `version`. One rank calls it before publishing."""
        self._manager.call("announce", version, step, timeout_s=_LEDGER_TIMEOUT_S)

    def position(self) -> str:
        """The ledger's position, for a checkpoint to store. One rank calls it."""
        position: str = self._manager.call("position", timeout_s=_LEDGER_TIMEOUT_S)
        return position

    def checkpointed(self, step: int, version: int, kept: Sequence[int]) -> None:
        """Records a complete checkpoint after `step` steps. One rank calls it. `kept` are the steps
        of all complete checkpoints that are there now."""
        self._manager.call("checkpointed", step, version, list(kept), timeout_s=_LEDGER_TIMEOUT_S)

    def next_batch(
        self, step: int, version: int, serve_sync: ServeSync, timeout_s: float
    ) -> Mapping[str, Any]:
        """This rank's part of the next batch of whole groups.

        Args:
            step: optimizer steps done; reports that earlier batches have been trained on.
            version: of the weights after these steps, which were published last.
            serve_sync: publishes the given, current version again to the engines that lack it;
                called on all ranks or on none.

        Raises:
            DeadlineExceeded: no batch in `timeout_s` seconds, a trainer's `rollout.timeout_s`.
            RewardError, RolloutError: the manager cannot make a batch.
            JobFailed: another rank or an essential process failed.
        """
        return self._collect("next_batch", "batch", (step, version), serve_sync, timeout_s)

    def evaluate(
        self, step: int, temperature: float, serve_sync: ServeSync, timeout_s: float
    ) -> Mapping[str, Any]:
        """Scores of the held-out prompts; like `next_batch`. See `RolloutManager.evaluate`."""
        return self._collect("evaluate", "eval", (step, temperature), serve_sync, timeout_s)

    def begin_evaluation(self, step: int, temperature: float) -> None:
        """Has the answer of `evaluate` generated beside batches. One rank calls it."""
        self._manager.call("begin_evaluation", step, temperature, timeout_s=_LEDGER_TIMEOUT_S)

    def is_evaluated(self) -> bool:
        """Whether `evaluate` need not wait for what `begin_evaluation` began; true, too, if a
        manager that was killed has forgotten it."""
        with suppress(DeadlineExceeded):
            evaluation = self._stats()["evaluation"]
            return evaluation is None or evaluation["groups_scored"] == evaluation["groups"]
        return False

    def batch_progress(self) -> tuple[int, int, str]:
        """Scored prompts of the next batch, of all, and what others wait for. Thread-safe."""
        stats = self._stats()
        num_wanted = stats["training"]["groups_per_step"]
        waits = {"the reward function": stats["scoring"][0], "the teacher": stats["at_teacher"]}
        text = ", ".join(f"{count} wait for {what}" for what, count in waits.items() if count)
        return min(stats["training"]["groups_ready"], num_wanted), num_wanted, text

    def evaluation_progress(self) -> tuple[int, int] | None:
        """Finished completions of the evaluation, of all; None before it begins. Thread-safe."""
        evaluation = self._stats()["evaluation"]
        if evaluation is None:
            return None
        total = evaluation["trajectories"]
        return total - evaluation["trajectories_open"], total

    def _stats(self) -> Mapping[str, Any]:
        stats: Mapping[str, Any] = self._manager.call("stats", timeout_s=_PROGRESS_TIMEOUT_S)
        return stats

    def _collect(
        self,
        method: str,
        kind: str,
        args: tuple[object, ...],
        serve_sync: ServeSync,
        timeout_s: float,
    ) -> Mapping[str, Any]:
        deadline = time.monotonic() + timeout_s
        late = DeadlineExceeded(
            f"{method} did not return within rollout.timeout_s = {timeout_s:g} s: raise it if "
            "generations and rewards may take longer"
        )
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise late
            try:
                reply: Mapping[str, Any] = self._manager.call(
                    method, self._rank, *args, timeout_s=remaining_s
                )
            except DeadlineExceeded as error:
                if isinstance(error.__cause__, RemoteError):
                    raise  # an error of a call that the manager made
                raise late from None
            if reply["kind"] == kind:
                return reply
            if reply["kind"] != "sync_wanted":
                raise ProtocolError(f"{method} answered {reply['kind']!r}, not {kind!r}")
            serve_sync(int(reply["version"]))
