"""The groups that are trained on, from admission to trained.

    admission -> open: running -> ready (scored) -> leased for a step -> trained
                       |            |
                       +------------+--> dropped, with a reason; the next prompt takes its place

Generation goes on across steps as far as the staleness bound lets it; see `staleness`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from umbra.runtime.errors import RewardError, RolloutError, UmbraError
from umbra.runtime.rollout.buffer.staleness import StalenessBound, VersionSteps
from umbra.runtime.rollout.buffer.zero_variance_groups import ZeroVarianceGroups
from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.manager.group_recovery import Recovered
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.rollout_config import RolloutSettings

logger = logging.getLogger(__name__)

# Groups over which `max_failed_share` is counted.
_FAILURE_WINDOW: Final = 200


class GroupSource(Protocol):
    """Where groups come from: `Admission`."""

    @property
    def num_prompts(self) -> int: ...

    def training_group(self, place: int) -> Group: ...

    def epoch_of(self, place: int) -> int: ...


class TrainingFlow:
    """Keeps engines busy with training groups and hands out whole batches of them.

    Args:
        take_metrics: numbers of the engines since the last batch.
        on_change: called when a batch may have become ready.
        on_failure: told of an error that ends the job.
        note: takes lines for the person who runs the job.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        source: GroupSource,
        runner: GroupRunner,
        versions: VersionSteps,
        recorder: Recorder,
        take_metrics: Callable[[], Mapping[str, float]],
        *,
        on_change: Callable[[], None],
        on_failure: Callable[[UmbraError], None],
        note: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._source = source
        self._runner = runner
        self._versions = versions
        self._bound = StalenessBound(
            max_staleness=settings.max_staleness,
            groups_per_step=settings.groups_per_step,
            over_sampling=settings.over_sampling,
        )
        self._recorder = recorder
        self._take_metrics = take_metrics
        self._next_place: int | None = None
        self._is_abandoned = False
        self._on_change = on_change
        self._on_failure = on_failure
        self._step = -1
        self._open: dict[int, Group] = {}  # by place
        self._held: dict[int, Group] = {}  # admitted in an earlier life, not begun since
        self._ready: dict[int, Group] = {}  # those of `_open` that are scored, as they came
        self._leases: dict[int, list[Group]] = {}  # by step
        self._ended: deque[bool] = deque(maxlen=_FAILURE_WINDOW)  # True for groups that failed
        self._uniform = ZeroVarianceGroups(source.num_prompts, settings.groups_per_step, note)
        self._began = time.monotonic()
        self._since_last: dict[str, float] = {}  # numbers of the time between the last two batches
        self._dropped_tokens = 0
        self.gen_s = 0.0
        self.num_admitted = 0
        self.num_trained = 0
        self.dropped: Counter[str] = Counter()  # groups, by reason

    # -- steps ---------------------------------------------------------------------------

    def advance(self, step: int) -> None:
        """The ranks want the batch of `step`: what was leased for earlier ones is trained.

        Raises:
            RolloutError: a step that is over.
        """
        if step < self._step:
            raise RolloutError(
                f"the batch of step {step + 1} is asked for after that of {self._step + 1}"
            )
        if self._next_place is None:
            self._next_place = step * self._settings.groups_per_step
        if step > self._step:
            self._step = step
            if self._settings.max_staleness == 0:
                self._began = time.monotonic()  # nothing was generated while the ranks trained
        for done in [leased for leased in self._leases if leased < step]:
            self.num_trained += len(self._leases.pop(done))
        for place in [p for p, group in self._open.items() if self._is_too_old(group)]:
            self._drop(place, "too old")
        self.admit()

    def go_on(self) -> None:
        """After `restore`, where the ranks have not asked yet and may train meanwhile.

        What the last batch was handed out for is the step that admission counts from. With none
        out, a later step may be announced, for which what engines have is too old: nothing new is
        begun.
        """
        if self._leases:
            self.advance(max(self._leases))

    def admit(self) -> None:
        """Starts as many groups as the staleness bound has room for, while the ledger has room.

        Where the disk is slower than the engines, admission waits for it and goes on by itself.
        What is open is not held up, so the ledger's queue may grow beyond its bound by what the
        open groups still write: their tokens, and what their agent loops keep. An error is the
        job's: nobody may be there to catch it.
        """
        if self._step < 0:
            return  # none is known yet
        while self._next_place is not None and self._bound.room(self._num_open):
            if self._is_abandoned:
                return
            if not self._recorder.has_room:
                self._recorder.when_room(self.admit)
                return
            if self._held:
                place = min(self._held)
                group = self._held.pop(place)
            else:
                place = self._next_place
                try:
                    group = self._source.training_group(place)
                    self._recorder.admitted(group, self._source.epoch_of(place), place)
                except UmbraError as error:
                    self._on_failure(error)
                    return
                self._next_place += 1
                self.num_admitted += 1
            self._open[place] = group
            self._start(place, group)

    def restore(self, recovered: Recovered) -> None:
        """Goes on from what the ledger has kept."""
        for group in self._open.values():
            self._runner.abandon(group)
        begun = {place: group for place, group in recovered.open.items() if group.has_tokens}
        self._held = {place: g for place, g in recovered.open.items() if place not in begun}
        self._ready = dict(recovered.ready)
        self._open = begun | self._ready
        self._leases = {step: list(groups) for step, groups in recovered.leases.items()}
        self._next_place, self._step = recovered.next_place, -1
        self._is_abandoned = False
        self._uniform.end_row()
        self.num_admitted, self.num_trained = recovered.num_admitted, recovered.num_trained
        self.dropped = Counter(recovered.dropped)
        for place, group in begun.items():
            self._start(place, group)

    def take(self, step: int) -> list[Group] | None:
        """The groups of `step`, which are leased to it; None while there are too few.

        Raises:
            RolloutError: a token that breaks the staleness bound.
        """
        if step not in self._leases:
            places = self._choose()
            if places is None:
                return None
            groups = [self._ready.pop(place) for place in places]
            for place, group in zip(places, groups, strict=True):
                del self._open[place]
                self._bound.check(self._token_steps(group), step, f"group {group.group_id}")
            self._leases[step] = groups
            self._recorder.leased(step, groups)
            self._uniform.batch_taken()
            now = time.monotonic()
            self.gen_s, self._began = now - self._began, now
            dropped_tokens, self._dropped_tokens = float(self._dropped_tokens), 0
            self._since_last = {**self._take_metrics(), "dropped_tokens": dropped_tokens}
        return self._leases[step]

    def leased(self, step: int) -> list[Group] | None:
        """The groups that were handed out for `step`; None where none were."""
        return self._leases.get(step)

    def abandon(self) -> None:
        """The job fails, or begins anew: nothing is generated or admitted until `restore`."""
        self._is_abandoned = True
        for group in self._open.values():
            self._runner.abandon(group)

    def progress(self) -> dict[str, int]:
        """Counts for `stats()`."""
        held = [*self._open.values(), *self._held.values()]
        samples = [sample for group in held for sample in group.trajectories]
        return {
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
        """Numbers of a batch that is handed out now. Ages are of tokens, in optimizer steps."""
        ages: Counter[int] = Counter()
        for group in groups:
            for sample in group.trajectories:
                for segment in sample.segments():
                    if segment.version != NOT_GENERATED:
                        age = self._step - self._versions.step_of(segment.version)
                        ages[age] += segment.stop - segment.start
        num_tokens = max(1, ages.total())
        return {
            "ledger_queued_mib": self._recorder.queued_nbytes / 2**20,
            "staleness_mean": sum(age * count for age, count in ages.items()) / num_tokens,
            "staleness_max": float(max(ages, default=0)),
            **{
                f"staleness_{age}_share": ages[age] / num_tokens
                for age in range(self._settings.max_staleness + 1)
            },
            **{
                f"dropped_{reason.replace(' ', '_')}": float(count)
                for reason, count in self.dropped.items()
            },
            **self._since_last,
        }

    # -- private -------------------------------------------------------------------------

    @property
    def _num_open(self) -> int:
        return len(self._open) + sum(map(len, self._leases.values()))

    def _start(self, place: int, group: Group) -> None:
        self._runner.start(
            group,
            self._settings.temperature,
            lambda group: self._on_scored(place, group),
            lambda group, error: self._on_failed(place, error),
        )

    def _choose(self) -> list[int] | None:
        """Places of a batch: the first admitted, or, where it is allowed, the first ready."""
        wanted = self._settings.groups_per_step
        in_order = self._settings.batch_order == "in_order" and self._bound.over_sampling == 1.0
        places = (sorted(self._open) if in_order else list(self._ready))[:wanted]
        if len(places) < wanted or not all(place in self._ready for place in places):
            return None
        return sorted(places)

    def _on_scored(self, place: int, group: Group) -> None:
        if self._settings.drop_zero_variance_groups and group.is_uniform:
            self._on_uniform(place, group)
            return
        self._uniform.end_row()
        self._ended.append(False)
        self._ready[place] = group
        self._on_change()

    def _on_uniform(self, place: int, group: Group) -> None:
        self._drop(place, "all rewards equal")
        try:
            self._uniform.dropped(group, len(self._ready))
        except RolloutError as error:
            self._on_failure(error)
            return
        self.admit()

    def _on_failed(self, place: int, error: UmbraError) -> None:
        """One prompt is not worth the job, but a function that fails often is the job's fault."""
        is_reward = isinstance(error, RewardError)
        self._drop(place, "reward failed" if is_reward else "agent loop failed", str(error))
        self._ended.append(True)
        window = min(_FAILURE_WINDOW, self.num_admitted)
        num_failed, allowed = sum(self._ended), int(self._settings.max_failed_share * window)
        if num_failed > allowed:
            said = (
                f"{error} (that makes {num_failed} of {window} groups that failed; "
                f"rollout.max_failed_share = {self._settings.max_failed_share:g} allows {allowed})"
            )
            self._on_failure(RewardError(said) if is_reward else RolloutError(said))
            return
        logger.warning("a group was dropped: %s", error)
        self.admit()

    def _drop(self, place: int, reason: str, cause: str = "") -> None:
        group = self._open.pop(place)
        self._ready.pop(place, None)
        self._runner.abandon(group)
        self._recorder.dropped(group, reason, cause)
        self._dropped_tokens += sum(sample.num_generated for sample in group.trajectories)
        self.dropped[reason] += 1
        logger.info("group %s is dropped: %s", group.group_id, reason)

    def _is_too_old(self, group: Group) -> bool:
        oldest = min(self._token_steps(group), default=self._step)
        return self._bound.is_too_old(oldest, self._step)

    def _token_steps(self, group: Group) -> Iterator[int]:
        for sample in group.trajectories:
            for segment in sample.segments():
                if segment.version != NOT_GENERATED:
                    yield self._versions.step_of(segment.version)
