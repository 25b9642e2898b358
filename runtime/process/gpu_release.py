from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Final

from umbra.runtime.process.nvml import LIBRARY, GpuReading, Nvml

_STILL_S: Final = 0.2
# No device's use may have fallen for this long. A longer time delays every restart on a GPU; a
# shorter one mistakes a pause of the driver for the end.
_LOOK_INTERVAL_S: Final = 0.05
_FALL_NBYTES: Final = 32 << 20  # less is noise
_ANSWER_LIMIT_S: Final = 2.0
# Time beyond the deadline for NVML to answer. A driver that hangs must not hold up the restart.
_GIB: Final = 1 << 30


class ReleaseWatch:
    """Decides from readings whether ended processes' memory is free. Pure. It is once these
    processes hold none, and use has stopped falling. If NVML knows them by other pids, only the
    second test counts. `now` is the time of the end, on a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._began = self._still_since = now
        self._last: GpuReading | None = None

    def observe(self, reading: GpuReading, now: float) -> bool:
        if self._last is not None:
            pairs = zip(self._last.used_nbytes, reading.used_nbytes, strict=True)
            if any(before - after >= _FALL_NBYTES for before, after in pairs):
                self._still_since = now
        self._last = reading
        return not any(reading.held_nbytes) and now - self._still_since >= _STILL_S

    def describe(self, now: float) -> str:
        assert self._last is not None
        held = [
            f"{nbytes / _GIB:.1f} GiB of GPU {idx}"
            for idx, nbytes in zip(self._last.indices, self._last.held_nbytes, strict=True)
            if nbytes
        ]
        after = f"{now - self._began:.0f} s after its end"
        if held:
            return f"its processes still hold {' and '.join(held)} {after}"
        return f"use of GPU memory is still falling {after}"


async def gpu_memory_released(
    pids: Collection[int],
    gpus: Sequence[str] | None,
    *,
    deadline_s: float,
    stop: asyncio.Event | None = None,
    library: str = LIBRARY,
) -> str:
    """Returns "" once the memory of ended `pids` is free on `gpus` (see `Nvml.open`), at once
    without NVML or GPUs, or a description of the memory held at the deadline.

    The driver frees it while a process ends, but maybe after the reaping; an early memory check
    would fail the successor. `stop` ends the wait early.
    """
    stop = asyncio.Event() if stop is None else stop
    limit_s = deadline_s + _ANSWER_LIMIT_S
    try:
        async with asyncio.timeout(limit_s):
            return await _watch(pids, gpus, deadline_s, stop, library)
    except TimeoutError:
        return f"NVML did not report within {limit_s:.3g} s whether its memory is free"


async def _watch(
    pids: Collection[int],
    gpus: Sequence[str] | None,
    deadline_s: float,
    stop: asyncio.Event,
    library: str,
) -> str:
    clock = asyncio.get_running_loop().time
    began, problem = clock(), ""
    watch = ReleaseWatch(began)
    # In a thread, because a driver that tears something down blocks callers.
    nvml = await asyncio.to_thread(Nvml.open, library, gpus=gpus)
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
    nvml.close()  # skipped on cancellation: it would wait for the call in progress
    return problem
