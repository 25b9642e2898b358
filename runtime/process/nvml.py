"""Reads GPU memory use from NVIDIA's management library by ctypes: no CUDA context, no package."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

LIBRARY: Final = "libnvidia-ml.so.1"

_MAX_PROCESSES: Final = 512  # on one device; NVML names none if there are more
_UNKNOWN_NBYTES: Final = 2**64 - 1


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
    """One reading of all devices.

    Attributes:
        used_nbytes: per device, by all processes.
        held_nbytes: per device, by the processes asked for. It is 0 in a container where NVML knows
            them by other pids.
    """

    used_nbytes: tuple[int, ...]
    held_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One device at one moment.

    Attributes:
        used_nbytes: by all processes and the driver.
        by_pid: per process whose share NVML knows. In a container the pids may be the host's.
    """

    total_nbytes: int
    used_nbytes: int
    by_pid: Mapping[int, int]


class Nvml:
    """Whoever opens it closes it. All calls may block while a device wakes."""

    def __init__(self, library: Any, devices: list[ctypes.c_void_p]) -> None:
        """Use `open`."""
        self._library = library
        self._devices = devices
        self._processes_of: Any = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)

    @classmethod
    def open(cls, path: str = LIBRARY) -> Self | None:
        """None if there is no library, no driver or no device."""
        try:
            library: Any = ctypes.CDLL(path)
        except OSError:
            return None
        if library.nvmlInit_v2() != 0:
            return None
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        devices: list[ctypes.c_void_p] = []
        for idx in range(count.value):
            device = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(idx, ctypes.byref(device)) == 0:
                devices.append(device)
        nvml = cls(library, devices)
        if not devices:
            nvml.close()
            return None
        return nvml

    def close(self) -> None:
        self._library.nvmlShutdown()

    @property
    def num_devices(self) -> int:
        return len(self._devices)

    def read(self, pids: Collection[int]) -> GpuReading:
        """What is used now, and how much of it `pids` hold. A device that does not report counts as
        0."""
        return GpuReading(
            used_nbytes=tuple(self._used_nbytes(device) for device in self._devices),
            held_nbytes=tuple(self._held_nbytes(device, pids) for device in self._devices),
        )

    def uses(self) -> list[GpuUse]:
        """How much each process holds of each device. A device that does not report counts as 0."""
        uses: list[GpuUse] = []
        for device in self._devices:
            memory = self._memory(device)
            by_pid = {p.pid: p.used for p in self._processes(device) if p.used != _UNKNOWN_NBYTES}
            uses.append(GpuUse(total_nbytes=memory.total, used_nbytes=memory.used, by_pid=by_pid))
        return uses

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
        # A process that is listed holds some memory, whether NVML knows how much or not.
        return sum(max(1, p.used) if p.used != _UNKNOWN_NBYTES else 1 for p in ours)


def count_gpus() -> int:
    """The GPUs of this machine; 0 without NVML."""
    nvml = Nvml.open()
    if nvml is None:
        return 0
    nvml.close()
    return nvml.num_devices
