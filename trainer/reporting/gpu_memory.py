"""The memory of GPUs, by NVML: its size, and what all processes together use in each phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from umbra.runtime.cluster.memory_plan import GIB, Phase
from umbra.runtime.process.nvml import Nvml


def gpu_sizes(gpus: Sequence[str]) -> list[int]:
    """Bytes of the named GPUs; [] if NVML cannot tell, or one is a MIG instance."""
    nvml = None if any(gpu.startswith("MIG-") for gpu in gpus) else Nvml.open(gpus=gpus)
    if nvml is None:
        return []
    try:
        return [use.total_nbytes for use in nvml.uses()]
    finally:
        nvml.close()


class GpuMemorySeen:
    """Reads NVML when it is told to look, which takes microseconds. One rank of a node has one.

    Attributes:
        most_nbytes: by phase, node (0) and GPU, since the start.
    """

    def __init__(self, nvml: Nvml | None) -> None:
        self._nvml = nvml
        self._last: dict[Phase, int] = {}
        self.most_nbytes: dict[Phase, dict[tuple[int, int], int]] = {}

    @classmethod
    def open(cls, gpus: Sequence[str]) -> Self:
        """Sees nothing without NVML.

        Args:
            gpus: as the plan names them.
        """
        return cls(Nvml.open(gpus=gpus) if gpus else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._nvml is not None:
            self._nvml.close()

    def look(self, phase: Phase) -> None:
        """To be called when the phase takes most."""
        if self._nvml is None:
            return
        most = self.most_nbytes.setdefault(phase, {})
        used = [use.used_nbytes for use in self._nvml.uses()]
        for gpu, nbytes in enumerate(used):
            most[0, gpu] = max(nbytes, most.get((0, gpu), 0))
        self._last[phase] = max(used)

    def take_metrics(self) -> dict[str, float]:
        """`memory/PHASE_gpu_gib` of the fullest GPU, since the last call."""
        last, self._last = self._last, {}
        return {f"memory/{phase}_gpu_gib": nbytes / GIB for phase, nbytes in last.items()}
