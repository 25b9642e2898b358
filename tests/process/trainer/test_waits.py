"""How long ranks wait for each other, and the memory of their GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml

from umbra.runtime.cluster.memory_plan import GIB
from umbra.runtime.process.nvml import gpu_sizes
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.reporting.memory_metrics import GpuMemorySeen
from umbra.trainer.services.job_plan import collective_timeout_s

LEAST_S = 1800.0


def limit_s(**sections: Any) -> float:
    required = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "reward": {"function": "rewards:score"},
        "rollout": {"timeout_s": 60.0},
        "train": {"steps": 1},
    }
    return collective_timeout_s(check_config(TrainerConfig, required | sections, "config"))


def test_short_waits_leave_it_at_the_least() -> None:
    assert limit_s() == LEAST_S


@pytest.mark.parametrize(
    "sections", [{"pool": {"sync_timeout_s": 7200}}, {"rollout": {"timeout_s": 7200}}]
)
def test_a_longer_wait_makes_it_longer_than_that(sections: dict[str, Any]) -> None:
    assert limit_s(**sections) > 7200


def test_starts_one_after_the_other_add_up_and_others_do_not() -> None:
    def pools(mode: str) -> dict[str, Any]:
        pool = {"model_path": "judge", "mode": mode, "start_timeout_s": 3600}
        return {"first": pool, "second": pool}

    in_turn_s = limit_s(pool={"sync_timeout_s": 1200}, pools=pools("colocated"))
    at_once_s = limit_s(pool={"sync_timeout_s": 1200}, pools=pools("standalone"))

    assert in_turn_s > 1200 + 2 * 3600
    assert 3600 < at_once_s < 2 * 3600


@pytest.mark.process
@pytest.mark.slow
def test_the_group_of_the_ranks_and_that_of_their_mesh_have_it() -> None:
    code = """
        import torch
        from umbra.runtime.cluster.environment import TorchrunEnvironment
        from umbra.trainer.world.mesh import Mesh

        with Mesh.join(TorchrunEnvironment.read(), "cpu", 7777.0) as world:
            for group in (torch.distributed.group.WORLD, world.fsdp.get_group()):
                print(group._get_backend(world.device).options._timeout.total_seconds())
    """
    environ = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-c", textwrap.dedent(code)]

    said = subprocess.check_output(command, env=environ, text=True, timeout=120)

    assert said.split() == ["7777.0"] * 2


@pytest.mark.process
def test_sizes_are_known_for_all_gpus_or_for_none(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(FakeGpu(), FakeGpu(uuid="GPU-1"), FakeGpu(uuid="GPU-shares-memory"))

    assert gpu_sizes(("0", "GPU-1"), fake_nvml.library) == [140 * GIB, 140 * GIB]
    assert gpu_sizes(("0", "2"), fake_nvml.library) == []
    assert gpu_sizes(("MIG-instance-of-0",), fake_nvml.library) == []
    assert gpu_sizes(("0",), "no-such-library.so") == []


@pytest.mark.process
def test_the_last_reading_of_planned_gpus_counts(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(*(FakeGpu(used_nbytes=n * GIB, uuid=f"GPU-{n}") for n in (1, 50, 3)))

    with GpuMemorySeen.open(("2", "1", "0"), (0, 2), fake_nvml.library) as seen:
        seen.look("train")
        fake_nvml.show(*(FakeGpu(used_nbytes=n * GIB, uuid=f"GPU-{n}") for n in (2, 50, 4)))
        seen.look("train")
        seen.look("sync")

    assert seen.seen_nbytes["train"] == {(0, 0): 4 * GIB, (0, 2): 2 * GIB}
    assert seen.metrics() == {"memory/train_gpu_gib": 4.0, "memory/sync_gpu_gib": 4.0}


@pytest.mark.process
def test_nothing_is_read_where_nothing_is_planned(fake_nvml: FakeNvml) -> None:
    fake_nvml.show(FakeGpu())

    with GpuMemorySeen.open(("0",), (), fake_nvml.library) as seen:
        seen.look("train")

    assert seen.metrics() == {}
