"""Training groups, from admission to the step that trained on them.

    admission -> open: running -> ready (scored) -> leased for a step -> trained
                       |            |
                       +------------+--> dropped, with a reason; the next prompt takes its place

Generation continues across steps as far as `StalenessBound` allows.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from umbra.runtime.errors import RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED, Group, tokens_by_version
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.admission import Admission, StalenessBound, VersionSteps
from umbra.runtime.rollout.manager.dropped_groups import FailedGroups, ZeroVarianceGroups
from umbra.runtime.rollout.manager.group_recovery import Recovered
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.rollout_config import RolloutSettings
from umbra.runtime.tracing.spans import gauge, past_span

logger = logging.getLogger(__name__)


class TrainingFlow:
    """Supplies engines with training groups and delivers whole batches of them; a `GroupOwner`.

    Args:
        dispatcher: measures the engines' work between batches.
        on_failure: called with an error that ends the job.
        note: called with lines for the operator.

    Attributes:
        changed: set when a batch may have become complete.
        versions: the versions that were announced.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        admission: Admission,
        runner: GroupRunner,
        recorder: Recorder,
        dispatcher: Dispatcher,
        on_failure: Callable[[UmbraError], None],
        note: Callable[[str], None],
    ) -> None:
        self.changed = asyncio.Event()
        self.versions = VersionSteps()
        self._settings = settings
        self._admission = admission
        self._runner = runner
        self._bound = StalenessBound(
            max_staleness=settings.max_staleness,
            groups_per_step=settings.groups_per_step,
            over_sampling=settings.over_sampling,
        )
        self._recorder = recorder
        self._dispatcher = dispatcher
        self._on_failure = on_failure
        self._open: dict[int, Group] = {}  # by index in the prompt order, as all groups here
        self._failed = FailedGroups(settings.max_failed_share, note)
        self._zero_variance = ZeroVarianceGroups(
            admission.num_prompts, settings.groups_per_step, note
        )
        self.restore(Recovered())
        gauge("groups", lambda: {"open": len(self._open), "scored": len(self._ready)})

    def learn(self, version: int, step: int) -> None:
        """Records that `version` is the weights after `step` steps."""
        self._recorder.version(version, step)
        self.versions.learn(version, step)

    def advance(self, step: int) -> None:
        """Begins the step whose batch the ranks ask for; batches of earlier ones are trained on."""
        if step < self._step:
            raise RolloutError(
                f"the batch of step {step + 1} was requested after that of {self._step + 1}"
            )
        if self._next_idx is None:
            self._next_idx = step * self._settings.groups_per_step
        if step > self._step:
            # Nothing was generated for this batch before: the run starts, or the ranks trained.
            if self._step < 0 or self._settings.max_staleness == 0:
                self._begin_batch()
            self._step = step
        for done in [leased for leased in self._leases if leased < step]:
            self.num_trained += len(self._leases.pop(done))
        for group in [group for group in self._open.values() if self._is_too_old(group)]:
            self._drop(group, "too old")
        self.admit()

    def resume(self) -> None:
        """Admits groups after `restore`, before the ranks ask; they may still be training.
        Admission counts from the step of the newest lease. Without a lease, a later step may have
        been announced, for which the engines' weights are too old: nothing new is begun."""
        if self._leases:
            self.advance(max(self._leases))

    def admit(self) -> None:
        """Starts as many groups as the staleness bound and the ledger's queue allow.

        If the disk is slower than the engines, admission waits for it and resumes by itself. Open
        groups are not held up, so their tokens and values may take the ledger's queue beyond its
        bound. Errors go to `on_failure`, because there may be no caller to catch them.
        """
        if self._step < 0:
            return  # no step is known yet
        while self._next_idx is not None and self._bound.num_admissible(self._num_open):
            if self._is_abandoned:
                return
            if not self._recorder.has_capacity:
                self._recorder.on_capacity(self.admit)
                return
            if self._not_begun:
                order_idx = next(iter(self._not_begun))
                group = self._not_begun.pop(order_idx)
            else:
                order_idx = self._next_idx
                try:
                    group = self._admission.training_group(order_idx)
                    self._recorder.admitted(group, self._admission.epoch_of(order_idx), order_idx)
                except UmbraError as error:
                    self._on_failure(error)
                    return
                self._next_idx += 1
                self.num_admitted += 1
            self._start(group)

    def restore(self, recovered: Recovered) -> None:
        for group in self._open.values():
            self._runner.abandon(group)
        begun = {idx: group for idx, group in recovered.open.items() if group.has_tokens}
        # Admitted by an earlier incarnation, without tokens.
        self._not_begun = {
            idx: group for idx, group in sorted(recovered.open.items()) if idx not in begun
        }
        self._ready = dict(recovered.ready)  # those of `_open` that are scored, in this order
        self._open = begun | self._ready
        self._leases = {step: list(groups) for step, groups in recovered.leases.items()}
        self._next_idx, self._step = recovered.next_idx, -1
        self._is_abandoned = False
        # Metrics of the time between the last two batches; a new manager does not know it.
        self._since_last: dict[str, float] = {}
        self._dropped_tokens = 0
        self._begin_batch()
        self._zero_variance.end_streak()
        self.num_admitted, self.num_trained = recovered.num_admitted, recovered.num_trained
        self.dropped = Counter(recovered.dropped)  # groups, by reason
        for group in begun.values():
            self._start(group)

    def take(self, step: int) -> list[Group] | None:
        """Leases a batch to `step` and returns its groups; None while there are too few."""
        if step not in self._leases:
            indices = self._choose()
            if indices is None:
                return None
            groups = [self._ready.pop(order_idx) for order_idx in indices]
            for order_idx, group in zip(indices, groups, strict=True):
                del self._open[order_idx]
                self._bound.check(self._token_steps(group), step, f"group {group.group_id}")
            self._leases[step] = groups
            self._recorder.leased(step, groups)
            self._zero_variance.batch_taken()
            past_span("batch", self._began, "batches", step=step + 1)
            self._since_last = {
                **self._dispatcher.take_metrics(),
                "dropped_tokens": float(self._dropped_tokens),
            }
            if num_tokens := self._dispatcher.num_generated - self._generated_before:
                gen_s = time.monotonic() - self._began
                self._since_last |= {"gen_s": gen_s, "tokens_per_s": num_tokens / gen_s}
            self._begin_batch()
            self._dropped_tokens = 0
        return self._leases[step]

    def leased(self, step: int) -> list[Group] | None:
        return self._leases.get(step)

    def abandon(self) -> None:
        """Stops generation and admission until `restore`."""
        self._is_abandoned = True
        for group in self._open.values():
            self._runner.abandon(group)

    def progress(self) -> dict[str, int]:
        held = [*self._open.values(), *self._not_begun.values()]
        samples = [sample for group in held for sample in group.trajectories]
        return {
            "step": self._step + 1,
            "groups_per_step": self._settings.groups_per_step,
            "groups_admitted": self.num_admitted,
            "groups_open": len(held),
            "groups_ready": len(self._ready),
            "groups_leased": sum(map(len, self._leases.values())),
            "groups_trained": self.num_trained,
            "groups_dropped": self.dropped.total(),
            "trajectories_open": sum(not sample.is_finished for sample in samples),
            "tokens": sum(sample.num_generated for sample in samples),
        }

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of a batch at its delivery. Ages are of tokens, in optimizer steps."""
        ages: Counter[int] = Counter()
        for version, num_tokens in tokens_by_version(groups).items():
            ages[self._step - self.versions.step_of(version)] += num_tokens
        staleness: dict[str, float] = {}
        if num_tokens := ages.total():
            staleness = {
                "staleness_mean": sum(age * count for age, count in ages.items()) / num_tokens,
                "staleness_max": float(max(ages)),
                **{
                    f"staleness_{age}_share": ages[age] / num_tokens
                    for age in range(self._settings.max_staleness + 1)
                },
            }
        return {
            "ledger_queued_mib": self._recorder.queued_nbytes / 2**20,
            **staleness,
            **{
                f"dropped_{reason.replace(' ', '_')}": float(count)
                for reason, count in self.dropped.items()
            },
            **self._since_last,
        }

    def _begin_batch(self) -> None:
        self._began, self._generated_before = time.monotonic(), self._dispatcher.num_generated

    @property
    def _num_open(self) -> int:
        return len(self._open) + sum(map(len, self._leases.values()))

    def _start(self, group: Group) -> None:
        self._open[group.order_idx] = group
        self._runner.start(group, self._settings.sampling, self)

    def _choose(self) -> list[int] | None:
        """Indices of a batch: the first admitted or, if settings allow it, the first ready."""
        wanted = self._settings.groups_per_step
        if len(self._ready) < wanted:
            return None
        in_order = self._settings.batch_order == "in_order" and self._bound.over_sampling == 1.0
        indices = (sorted(self._open) if in_order else list(self._ready))[:wanted]
        if not all(order_idx in self._ready for order_idx in indices):
            return None
        return sorted(indices)

    def on_scored(self, group: Group) -> None:
        self._failed.scored()
        if not (self._settings.drop_zero_variance_groups and group.has_zero_variance):
            self._zero_variance.end_streak()
            self._ready[group.order_idx] = group
            self.changed.set()
            return
        self._drop(group, "all rewards equal")
        try:
            self._zero_variance.dropped(group, len(self._ready))
        except RolloutError as error:
            self._on_failure(error)
            return
        self.admit()

    def on_failed(self, group: Group, error: UmbraError) -> None:
        """Drops a group. One failure costs one prompt; frequent failures end the job."""
        is_reward = isinstance(error, RewardError)
        self._drop(group, "reward failed" if is_reward else "agent loop failed", str(error))
        try:
            self._failed.failed(group, error, self.num_admitted)
        except RolloutError as too_many:
            self._on_failure(too_many)
            return
        self.admit()

    def _drop(self, group: Group, reason: str, cause: str = "") -> None:
        del self._open[group.order_idx]
        self._ready.pop(group.order_idx, None)
        self._runner.abandon(group)
        self._recorder.dropped(group, reason, cause)
        self._dropped_tokens += sum(sample.num_generated for sample in group.trajectories)
        self.dropped[reason] += 1
        logger.info(
            "group %s is dropped: %s", group.group_id, ": ".join(filter(None, (reason, cause)))
        )

    def _is_too_old(self, group: Group) -> bool:
        oldest = min(self._token_steps(group), default=self._step)
        return self._bound.is_too_old(oldest, self._step)

    def _token_steps(self, group: Group) -> Iterator[int]:
        for sample in group.trajectories:
            for segment in sample.segments():
                if segment.version != NOT_GENERATED:
                    yield self.versions.step_of(segment.version)
