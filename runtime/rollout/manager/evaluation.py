from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.group import Group
from umbra.runtime.rollout.manager.group_runner import GroupRunner
from umbra.runtime.rollout.sampling_options import SamplingOptions


class Evaluation:
    """One evaluation: a fixed set of groups, from fresh to scored, in callbacks on one loop.
    `on_done` is called once, when every group is scored; `on_failure` with the first error, which
    abandons the evaluation."""

    def __init__(
        self,
        groups: Sequence[Group],
        runner: GroupRunner,
        sampling: SamplingOptions,
        *,
        on_done: Callable[[], None],
        on_failure: Callable[[UmbraError], None],
    ) -> None:
        self.groups = list(groups)
        self.gen_s = 0.0
        self._runner = runner
        self._sampling = sampling
        self._on_done = on_done
        self._on_failure = on_failure
        self._num_unscored = len(self.groups)
        self._began = time.monotonic()

    @property
    def is_done(self) -> bool:
        return self._num_unscored == 0

    def progress(self) -> dict[str, int]:
        samples = [sample for group in self.groups for sample in group.trajectories]
        return {
            "groups": len(self.groups),
            "groups_scored": len(self.groups) - self._num_unscored,
            "trajectories": len(samples),
            "trajectories_open": sum(group.num_open for group in self.groups),
            "tokens": sum(sample.num_generated for sample in samples),
        }

    def begin(self) -> None:
        """Gives all groups to engines or agent loops, which take them as they have capacity."""
        for group in self.groups:
            self._runner.start(group, self._sampling, self._on_scored, self._on_failed)

    def abandon(self) -> None:
        for group in self.groups:
            self._runner.abandon(group)

    def _on_scored(self, _group: Group) -> None:
        self._num_unscored -= 1
        if self.is_done:
            self.gen_s = time.monotonic() - self._began
            self._on_done()

    def _on_failed(self, _group: Group, error: UmbraError) -> None:
        self.abandon()
        self._on_failure(error)
