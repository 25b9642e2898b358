from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import torch

from umbra.runtime.cluster.memory_plan import GIB, Phase
from umbra.runtime.process.nvml import LIBRARY, Nvml
from umbra.trainer.world.mesh import max_over_ranks

_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")


class MemoryAccount:
    """Measures a rank's memory in each phase of a step: on CUDA what torch has allocated and
    reserved (with the allocator's cache), on the CPU the process's resident memory. All ranks go
    through the same phases."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nbytes: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Measures at the beginning of the block, and the peak within it."""
        self._nbytes[f"{name}_allocated"] = began = self._reset()
        try:
            yield
        finally:
            # Linux may be some pages behind with a process's peak.
            self._nbytes[f"{name}_peak"] = max(began, self._peak())
            if self._device.type == "cuda":
                reserved = torch.cuda.max_memory_reserved(self._device)
                self._nbytes[f"{name}_reserved"] = reserved

    def take(self) -> dict[str, float]:
        """`memory/PHASE_allocated_gib`, `..._peak_gib` and, on CUDA, `..._reserved_gib` (the peak
        in the phase), each of the rank with most. Collective. Clears the measurements."""
        counts = torch.tensor(list(self._nbytes.values()), dtype=torch.float64)
        most: Any = max_over_ranks(counts) / GIB  # torch leaves `tolist` untyped
        gib: list[float] = most.tolist()
        names, self._nbytes = list(self._nbytes), {}
        return {f"memory/{name}_gib": value for name, value in zip(names, gib, strict=True)}

    def _reset(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return torch.cuda.memory_allocated(self._device)
        with suppress(OSError):  # if a container forbids it, the peak is the process's
            _CLEAR_REFS.write_text("5")
        return _resident("VmRSS")

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _resident("VmHWM")


def _resident(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


class GpuMemorySeen:
    """The memory that all processes together use on the GPUs in each phase, by NVML. `seen_nbytes`
    has the last readings, which take microseconds, by phase, node (0) and GPU."""

    def __init__(self, nvml: Nvml | None, planned: Sequence[int]) -> None:
        self._nvml = nvml
        self._planned = planned
        self.seen_nbytes: dict[Phase, dict[tuple[int, int], int]] = {}

    @classmethod
    def open(cls, gpus: Sequence[str], planned: Sequence[int], library: str = LIBRARY) -> Self:
        """`gpus` are the node's, as the plan names them; only indices in `planned` are read."""
        return cls(Nvml.open(library, gpus=[gpus[idx] for idx in planned]), planned)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._nvml is not None:
            self._nvml.close()

    def look(self, phase: Phase) -> None:
        """Must be called when the phase takes most."""
        if self._nvml is not None:
            uses = zip(self._planned, self._nvml.uses(), strict=True)
            self.seen_nbytes[phase] = {(0, gpu): use.used_nbytes for gpu, use in uses}

    def metrics(self) -> dict[str, float]:
        """`memory/PHASE_gpu_gib` of the fullest GPU."""
        return {
            f"memory/{phase}_gpu_gib": max(by_gpu.values()) / GIB
            for phase, by_gpu in self.seen_nbytes.items()
        }
