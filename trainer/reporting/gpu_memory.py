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
        seen_nbytes: by phase, node (0) and GPU, when it looked last.
    """

    def __init__(self, nvml: Nvml | None) -> None:
        self._nvml = nvml
        self.seen_nbytes: dict[Phase, dict[tuple[int, int], int]] = {}

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
        uses = self._nvml.uses()
        self.seen_nbytes[phase] = {(0, gpu): use.used_nbytes for gpu, use in enumerate(uses)}

    def metrics(self) -> dict[str, float]:
        """`memory/PHASE_gpu_gib` of the fullest GPU."""
        return {
            f"memory/{phase}_gpu_gib": max(by_gpu.values()) / GIB
            for phase, by_gpu in self.seen_nbytes.items()
        }
