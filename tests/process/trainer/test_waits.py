"""No wait that the settings allow is cut by torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import TrainerConfig
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
