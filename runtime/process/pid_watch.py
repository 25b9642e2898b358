from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import TracebackType


class PidWatch:
    """Calls `callback` once on the running loop when process `pid`, child or not, ends, or has
    ended. Must be closed before the loop ends. Does not reap."""

    def __init__(self, pid: int, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1
            self._soon: asyncio.Handle | None = self._loop.call_soon(callback)
            return
        self._soon = None
        self._loop.add_reader(self._pidfd, self._on_exit)

    @classmethod
    def of_parent(cls, expected_pid: int, callback: Callable[[], None]) -> PidWatch:
        """Watches our parent; also calls back if another process is our parent by now."""
        watch = cls(expected_pid, callback)
        # Checked after the pidfd was opened, which therefore is our parent's.
        if os.getppid() != expected_pid and watch._pidfd >= 0:
            watch.close()
            watch._soon = watch._loop.call_soon(callback)
        return watch

    def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> PidWatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _on_exit(self) -> None:
        self.close()
        self._callback()
