"""The memory that all processes together use on the GPUs in each phase, by NVML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from umbra.runtime.cluster.memory_plan import GIB, Phase
from umbra.runtime.process.nvml import LIBRARY, Nvml


class GpuMemorySeen:
    """Reads NVML when it is asked, which takes microseconds.

    Attributes:
        seen_nbytes: by phase, node (0) and GPU, at the last reading.
    """

    def __init__(self, nvml: Nvml | None, planned: Sequence[int]) -> None:
        self._nvml = nvml
        self._planned = planned
        self.seen_nbytes: dict[Phase, dict[tuple[int, int], int]] = {}

    @classmethod
    def open(cls, gpus: Sequence[str], planned: Sequence[int], library: str = LIBRARY) -> Self:
        """Reads nothing if nothing is planned.

        Args:
            gpus: of the node, as the plan names them.
            planned: indices of those to read.
        """
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
