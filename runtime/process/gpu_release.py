"""Waits until the GPU memory of processes that have ended is free, so that a successor finds room.

The driver frees it while a process ends, as a rule before the process is reaped; it may take
longer, and a memory check of the successor that comes too early fails its start.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Final

from umbra.runtime.process.nvml import LIBRARY, GpuReading, Nvml

_STILL_S: Final = 0.2
# For so long no device's use may have fallen. Longer delays every restart on a GPU; shorter takes a
# pause of the driver for the end.
_LOOK_INTERVAL_S: Final = 0.05
_FALL_NBYTES: Final = 32 << 20  # less is noise
_ANSWER_LIMIT_S: Final = 2.0
# Beyond the deadline, for NVML to answer. A driver that hangs must not hold up the restart.
_GIB: Final = 1 << 30


class ReleaseWatch:
    """Decides from readings whether all is free: none is held by the dead, and use has stopped
    falling (where NVML knows the dead by other pids, that alone tells). Pure.

    Args:
        now: time of the end, of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._began = self._still_since = now
        self._last: GpuReading | None = None

    def observe(self, reading: GpuReading, now: float) -> bool:
        """Whether the wait is over."""
        if self._last is not None:
            pairs = zip(self._last.used_nbytes, reading.used_nbytes, strict=True)
            if any(before - after >= _FALL_NBYTES for before, after in pairs):
                self._still_since = now
        self._last = reading
        return not any(reading.held_nbytes) and now - self._still_since >= _STILL_S

    def describe(self, now: float) -> str:
        """What is not free yet."""
        assert self._last is not None
        held = [
            f"{nbytes / _GIB:.1f} GiB of GPU {idx}"
            for idx, nbytes in enumerate(self._last.held_nbytes)
            if nbytes
        ]
        after = f"{now - self._began:.0f} s after its end"
        if held:
            return f"its processes still hold {' and '.join(held)} {after}"
        return f"use of GPU memory is still falling {after}"


async def gpu_memory_released(
    pids: Collection[int],
    *,
    deadline_s: float,
    stop: asyncio.Event | None = None,
    library: str = LIBRARY,
) -> str:
    """Returns once the memory of `pids`, which have ended, is free; at once without NVML.

    Returns:
        What is not free at the deadline, or "". `stop` ends the wait early.
    """
    stop = asyncio.Event() if stop is None else stop
    limit_s = deadline_s + _ANSWER_LIMIT_S
    try:
        async with asyncio.timeout(limit_s):
            return await _watch(pids, deadline_s, stop, library)
    except TimeoutError:
        return f"NVML has not told within {limit_s:.3g} s of its end whether its memory is free"


async def _watch(
    pids: Collection[int], deadline_s: float, stop: asyncio.Event, library: str
) -> str:
    clock = asyncio.get_running_loop().time
    began, problem = clock(), ""
    watch = ReleaseWatch(began)
    # In a thread: a driver that tears something down keeps callers waiting.
    nvml = await asyncio.to_thread(Nvml.open, library)
    if nvml is None:
        return ""
    while not watch.observe(await asyncio.to_thread(nvml.read, pids), clock()):
        if clock() - began >= deadline_s:
            problem = watch.describe(clock())
            break
        if stop.is_set():
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_INTERVAL_S):
                await stop.wait()
    nvml.close()  # not where this was cancelled: it would wait for the call under way
    return problem
