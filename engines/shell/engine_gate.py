from __future__ import annotations

from collections.abc import Sequence

from umbra.runtime.engine_api.lifecycle import (
    EngineLifecycle,
    EngineState,
    SleepLevel,
    Tag,
    check_tags,
)
from umbra.runtime.errors import IllegalTransition


class EngineGate:
    """The engine's own copy of the lifecycle that the supervisor keeps; starts in PENDING_WEIGHTS.
    An engine driven by no supervisor, or by a faulty one, raises IllegalTransition for calls that
    would corrupt it: serving without weights, overwriting weights in use."""

    def __init__(self) -> None:
        self._lifecycle = EngineLifecycle().started()
        self._is_draining = False

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    @property
    def version(self) -> int | None:
        return self._lifecycle.version

    @property
    def next_version(self) -> int:
        return -1 if self._lifecycle.updating_to is None else self._lifecycle.updating_to

    @property
    def awake(self) -> frozenset[Tag]:
        return self._lifecycle.awake

    @property
    def is_serving(self) -> bool:
        """Whether requests make progress, as they still do while draining."""
        return self.state == EngineState.SERVING

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def admit(self) -> None:
        if not self.is_serving or self._is_draining:
            state = "draining" if self._is_draining else str(self._lifecycle)
            raise IllegalTransition(
                f"the engine is {state} and takes no requests; wait until it serves"
            )

    def start_serving(self, version: int) -> None:
        """Weights were loaded from disk: PENDING_WEIGHTS → SERVING(version)."""
        loading = self._lifecycle.begin_update(version)
        self._lifecycle = loading.commit_update(version).resume()

    def drain(self) -> None:
        self._is_draining = self.is_serving

    def pause(self) -> None:
        self._is_draining = False
        if self.is_serving:
            self._lifecycle = self._lifecycle.pause()

    def check_resume(self) -> None:
        """Changes nothing: refuses a resumption before memory is taken for it."""
        if not self.is_serving:
            self._lifecycle.resume()

    def resume(self) -> None:
        self._is_draining = False
        if not self.is_serving:
            self._lifecycle = self._lifecycle.resume()

    def sleep(self, level: SleepLevel, tags: Sequence[Tag]) -> None:
        if level not in (1, 2):
            raise ValueError(f"sleep level must be 1 or 2, got {level!r}")
        check_tags(tags)
        self._lifecycle = self._lifecycle.sleep(level, frozenset(tags))

    def wake(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Returns the tags to wake now; `woken` must follow."""
        check_tags(tags)
        sleeping = frozenset(tags) - self.awake
        if sleeping:
            self._lifecycle = self._lifecycle.wake(sleeping)
        return sleeping

    def woken(self) -> None:
        self._lifecycle = self._lifecycle.woken()

    def begin_update(self, version: int, *, is_idle: bool) -> None:
        """From here on the weights have no version. An idle engine need not be paused first."""
        if is_idle:
            self.pause()
        self._lifecycle = self._lifecycle.begin_update(version)

    def commit_update(self) -> int:
        version = self.next_version
        self._lifecycle = self._lifecycle.commit_update(version)
        return version

    def abort_update(self) -> None:
        if self.state == EngineState.UPDATING:
            self._lifecycle = self._lifecycle.abort_update()
