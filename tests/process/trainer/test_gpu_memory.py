"""What ranks read about GPU memory, with a library in NVML's place."""

from __future__ import annotations

import pytest
from fake_nvml import FakeGpu, FakeNvml

from umbra.runtime.cluster.memory_plan import GIB
from umbra.runtime.process.nvml import gpu_sizes
from umbra.trainer.reporting.memory_metrics import GpuMemorySeen

pytestmark = pytest.mark.process


def test_sizes_are_known_for_all_gpus_or_for_none(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(FakeGpu(), FakeGpu(uuid="GPU-1"), FakeGpu(uuid="GPU-shares-memory"))

    assert gpu_sizes(("0", "GPU-1"), fake_nvml.library) == [140 * GIB, 140 * GIB]
    assert gpu_sizes(("0", "2"), fake_nvml.library) == []
    assert gpu_sizes(("MIG-instance-of-0",), fake_nvml.library) == []
    assert gpu_sizes(("0",), "no-such-library.so") == []


def test_the_last_reading_of_planned_gpus_counts(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(*(FakeGpu(used_nbytes=n * GIB, uuid=f"GPU-{n}") for n in (1, 50, 3)))

    with GpuMemorySeen.open(("2", "1", "0"), (0, 2), fake_nvml.library) as seen:
        seen.look("train")
        fake_nvml.show(*(FakeGpu(used_nbytes=n * GIB, uuid=f"GPU-{n}") for n in (2, 50, 4)))
        seen.look("train")
        seen.look("sync")

    assert seen.seen_nbytes["train"] == {(0, 0): 4 * GIB, (0, 2): 2 * GIB}
    assert seen.metrics() == {"memory/train_gpu_gib": 4.0, "memory/sync_gpu_gib": 4.0}


def test_nothing_is_read_where_nothing_is_planned(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(FakeGpu())

    with GpuMemorySeen.open(("0",), (), fake_nvml.library) as seen:
        seen.look("train")

    assert seen.metrics() == {}
