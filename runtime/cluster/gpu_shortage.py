"""Recognises, explains and counts an engine's lack of GPU memory, as it starts or wakes.

    start or wake fails ─▶ was memory short? ─▶ who holds how much, and what to change
                                             └▶ the second time in a row is final

A restart frees only the memory that the engine itself held, so it does not cure the shortage.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from umbra.runtime.process.descendants import living_descendants
from umbra.runtime.process.nvml import GpuUse, Nvml

_SIGNS: Final = re.compile(
    "|".join(
        (
            # torch.OutOfMemoryError (c10/cuda/CUDACachingAllocator.cpp), by vLLM, SGLang and the
            # embedded engine; cudaErrorMemoryAllocation as torch prints it; and vLLM as it wakes
            # (csrc/cumem_allocator.cpp: "CUDA Error: out of memory at ...").
            r"CUDA (error: )?out of memory",
            # SGLang as it wakes: torch_memory_saver (csrc/utils.h) prints it and exits.
            r"CUresult error: +2 \(out of memory\)",
            # cuBLAS, which allocates by itself when its handle is made.
            r"CUBLAS_STATUS_ALLOC_FAILED",
            # vLLM's own checks as it starts (v1/worker/utils.py, v1/core/kv_cache_utils.py).
            r"on startup is less than desired GPU memory utilization",
            r"No available memory for the cache blocks",
            # SGLang's as it starts (srt/model_executor/model_runner.py).
            r"Not enough memory\. Please try to increase --mem-fraction-static",
        )
    ),
    re.IGNORECASE,
)
_GIB: Final = 1 << 30
_MIN_REPORTED_NBYTES: Final = _GIB // 10
# Memory held by unknown processes; below a gibibyte it is mostly the driver's own and not reported.
_MAX_IN_A_ROW: Final = 2
_NVML_LIMIT_S: Final = 2.0
# A driver that hangs must not hold up the restart.


def lacks_gpu_memory(text: str) -> bool:
    return _SIGNS.search(text) is not None


async def read_gpu_memory(roots: Mapping[int, str] = {}) -> str:
    """Describes the memory now. `roots` maps pids to ranks or actors, whose descendants count as
    theirs. The supervisor and its actors are below a rank, so ranks come first."""
    uses: list[GpuUse] = []
    holders: dict[int, str] = {}
    try:
        async with asyncio.timeout(_NVML_LIMIT_S):
            uses, holders = await asyncio.to_thread(_look, roots)
    except TimeoutError:
        pass
    return describe_gpu_memory(uses, holders)


def _look(roots: Mapping[int, str]) -> tuple[list[GpuUse], dict[int, str]]:
    below = {i.pid: name for root, name in roots.items() for i in living_descendants(root)}
    holders = below | dict(roots)
    nvml = Nvml.open()
    if nvml is None:
        return [], holders
    try:
        return nvml.uses(), holders
    finally:
        nvml.close()


def describe_gpu_memory(uses: Sequence[GpuUse], holders: Mapping[int, str]) -> str:
    """Describes in one line who holds how much, and which settings to change. `uses` is empty
    without NVML; `holders` maps each pid to a rank or actor."""
    sentences = [_describe_gpu(idx, use, holders) for idx, use in enumerate(uses)]
    sentences.append(
        "Lower pool.kv_cache_num_tokens (in [pools.NAME] for an auxiliary pool), pool.max_num_seqs "
        "or pool.max_context_len, or give the pool GPUs of its own."
    )
    if any(name.startswith("rank ") for name in holders.values()):
        sentences.append("In a hybrid pool, train.offload = 'optimizer' or 'all' makes room, too.")
    return " ".join(sentences)


def _describe_gpu(idx: int, use: GpuUse, holders: Mapping[int, str]) -> str:
    held: dict[str, int] = {}
    for pid, nbytes in use.by_pid.items():
        if pid in holders:
            held[holders[pid]] = held.get(holders[pid], 0) + nbytes
    unknown_nbytes = use.used_nbytes - sum(held.values())
    parts = [f"{name} holds {_gib(nbytes)}" for name, nbytes in held.items()]
    if unknown_nbytes >= _MIN_REPORTED_NBYTES:
        parts.append(f"unknown processes and the driver hold {_gib(unknown_nbytes)}")
    free = f"{_gib(use.total_nbytes - use.used_nbytes)} of {_gib(use.total_nbytes)} are free"
    return f"GPU {idx}: {', '.join([*parts, free])}."


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB"


class GpuShortages:
    def __init__(self, describe: Callable[[], Awaitable[str]]) -> None:
        self._describe = describe
        self._num_at_start = 0
        self._num_at_wake = 0
        self._description = ""
        self._has_failed_to_wake = False

    @property
    def is_final(self) -> bool:
        return self._num_at_start + self._num_at_wake >= _MAX_IN_A_ROW

    def started(self) -> None:
        self._num_at_start = 0

    def woke(self) -> None:
        self._num_at_wake = 0
        self._has_failed_to_wake = False

    async def failed_to_wake(self) -> None:
        """Must be called before the engine is killed, while it still holds its share."""
        self._has_failed_to_wake = True
        self._description = await self._describe()

    async def explain_end(self, text: str, *, is_start: bool) -> str:
        """The reason for the incarnation's end, by its error and log, if it was a lack of
        memory; else ""."""
        is_wake, self._has_failed_to_wake = self._has_failed_to_wake, False
        description, self._description = self._description, ""
        if not (is_start or is_wake) or not lacks_gpu_memory(text):
            return ""
        self._num_at_start += is_start
        self._num_at_wake += not is_start
        again = ", as the last time: a restart does not cure that" if self.is_final else ""
        what = "start" if is_start else "wake"
        return f"too little GPU memory to {what}{again}. {description or await self._describe()}"
