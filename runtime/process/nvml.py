"""GPUs as NVML reports them, and the wait for the memory that ended processes hold."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

LIBRARY: Final = "libnvidia-ml.so.1"

_MAX_PROCESSES: Final = 512  # on one device; NVML names none if there are more
_UNKNOWN_NBYTES: Final = 2**64 - 1
_MAX_UUID_NBYTES: Final = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE
_NUM_MASK_WORDS: Final = 128  # of 64 cores each: as many cores as Linux supports

_STILL_S: Final = 0.2
"""No device's use may have fallen for this long. A longer time delays every restart on a GPU; a
shorter one mistakes a pause of the driver for the end."""
_LOOK_INTERVAL_S: Final = 0.05
_FALL_NBYTES: Final = 32 << 20  # less is noise
_ANSWER_LIMIT_S: Final = 2.0
"""Time beyond the deadline for NVML to answer. A driver that hangs must not hold up the restart."""
_GIB: Final = 1 << 30


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t, whose `used` may be unknown."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance_id", ctypes.c_uint),
        ("compute_instance_id", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One reading of all devices, by nvidia-smi's numbers: bytes used by all processes, and held by
    the given ones, which is 0 in a container where NVML knows them by other pids."""

    indices: tuple[int, ...]
    used_nbytes: tuple[int, ...]
    held_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One device at one moment. `by_pid` has the processes whose share NVML knows, in a container
    maybe by the host's pids."""

    total_nbytes: int
    used_nbytes: int
    by_pid: Mapping[int, int]


class Nvml:
    """The GPUs of this machine, read by ctypes: no CUDA context, no package. All calls may block
    while a device wakes; the caller of `open` closes it."""

    def __init__(self, library: Any, devices: Sequence[ctypes.c_void_p]) -> None:
        self._library = library
        self._devices = devices
        self._processes_of: Any = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)

    @classmethod
    def open(cls, path: str = LIBRARY, *, gpus: Sequence[str] | None = None) -> Self | None:
        """Returns None without library, driver or device, or if NVML lacks one of `gpus`.

        `gpus` orders all reports. Each is named as in CUDA_VISIBLE_DEVICES: by its index, as NVML
        counts, or by its UUID or a unique beginning. A MIG instance stands for its GPU. None: all;
        (): no library is loaded.
        """
        if gpus is not None and not gpus:
            return None
        try:
            library: Any = ctypes.CDLL(path)
        except OSError:
            return None
        if library.nvmlInit_v2() != 0:
            return None
        every = _all_devices(library)
        found = every if gpus is None else [_find_device(library, gpu, every) for gpu in gpus]
        devices = [device for device in found if device is not None]
        if not devices or len(devices) < len(found):
            library.nvmlShutdown()
            return None
        return cls(library, devices)

    def close(self) -> None:
        self._library.nvmlShutdown()

    @property
    def num_devices(self) -> int:
        return len(self._devices)

    def read(self, pids: Collection[int]) -> GpuReading:
        """The memory used now, and the part that `pids` hold; 0 for a silent device."""
        return GpuReading(
            indices=tuple(self._index(device) for device in self._devices),
            used_nbytes=tuple(self._used_nbytes(device) for device in self._devices),
            held_nbytes=tuple(self._held_nbytes(device, pids) for device in self._devices),
        )

    def uses(self) -> list[GpuUse]:
        """Each process's share of each device; 0 for a silent device."""
        uses: list[GpuUse] = []
        for device in self._devices:
            memory = self._memory(device)
            by_pid = {p.pid: p.used for p in self._processes(device) if p.used != _UNKNOWN_NBYTES}
            uses.append(GpuUse(total_nbytes=memory.total, used_nbytes=memory.used, by_pid=by_pid))
        return uses

    def near_cores(self) -> list[frozenset[int]]:
        return [self._near_cores(device) for device in self._devices]

    def _near_cores(self, device: ctypes.c_void_p) -> frozenset[int]:
        words = (ctypes.c_uint64 * _NUM_MASK_WORDS)()
        if self._library.nvmlDeviceGetCpuAffinity(device, _NUM_MASK_WORDS, words) != 0:
            return frozenset()
        mask = int.from_bytes(words, "little")
        return frozenset(core for core in range(mask.bit_length()) if mask >> core & 1)

    def _index(self, device: ctypes.c_void_p) -> int:
        index = ctypes.c_uint()
        self._library.nvmlDeviceGetIndex(device, ctypes.byref(index))
        return index.value

    def _used_nbytes(self, device: ctypes.c_void_p) -> int:
        return int(self._memory(device).used)

    def _memory(self, device: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        failed = self._library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        return _Memory() if failed else memory

    def _processes(self, device: ctypes.c_void_p) -> list[_Process]:
        if self._processes_of is None:
            return []
        count = ctypes.c_uint(_MAX_PROCESSES)
        processes = (_Process * _MAX_PROCESSES)()
        if self._processes_of(device, ctypes.byref(count), processes) != 0:
            return []
        return processes[: count.value]

    def _held_nbytes(self, device: ctypes.c_void_p, pids: Collection[int]) -> int:
        ours = [process for process in self._processes(device) if process.pid in pids]
        # A listed process holds some memory, whether NVML knows how much or not.
        return sum(max(1, p.used) if p.used != _UNKNOWN_NBYTES else 1 for p in ours)


def _all_devices(library: Any) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    devices = [_device_at(library, idx) for idx in range(count.value)]
    return [device for device in devices if device is not None]


def _find_device(
    library: Any, name: str, every: Sequence[ctypes.c_void_p]
) -> ctypes.c_void_p | None:
    if name.isdecimal():
        return _device_at(library, int(name))
    if name.startswith("MIG-"):
        return _gpu_of_instance(library, name)
    named = [device for device in every if _uuid(library, device).startswith(name)]
    return named[0] if len(named) == 1 else None


def _device_at(library: Any, index: int) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    failed = library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
    return None if failed else device


def _gpu_of_instance(library: Any, uuid: str) -> ctypes.c_void_p | None:
    instance, gpu = ctypes.c_void_p(), ctypes.c_void_p()
    failed = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(instance))
    failed = failed or library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
        instance, ctypes.byref(gpu)
    )
    return None if failed else gpu


def _uuid(library: Any, device: ctypes.c_void_p) -> str:
    uuid = ctypes.create_string_buffer(_MAX_UUID_NBYTES)
    failed = library.nvmlDeviceGetUUID(device, uuid, _MAX_UUID_NBYTES)
    return "" if failed else uuid.value.decode()


def count_gpus() -> int:
    nvml = Nvml.open()
    if nvml is None:
        return 0
    nvml.close()
    return nvml.num_devices


def gpu_sizes(gpus: Sequence[str], library: str = LIBRARY) -> list[int]:
    """Bytes of the named GPUs; [] if NVML does not report one, or one is a MIG instance."""
    nvml = None if any(gpu.startswith("MIG-") for gpu in gpus) else Nvml.open(library, gpus=gpus)
    if nvml is None:
        return []
    try:
        sizes = [use.total_nbytes for use in nvml.uses()]
    finally:
        nvml.close()
    return sizes if all(sizes) else []


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
