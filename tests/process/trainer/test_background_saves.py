"""Checkpoints that are written while the ranks train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from background_save_programs import run_saves
from forked_ranks import start_fork

from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.trainer.checkpoint.file_digests import find_damage

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saves")
    run = DistributedWorld(tmp_path_factory.mktemp("worlds"), start_fork)
    return run(run_saves, str(folder), num_ranks=2, timeout_s=120.0)


def test_a_checkpoint_has_the_state_at_its_step_however_long_it_is_written(
    ran: list[dict[str, Any]],
) -> None:
    for of_rank in ran:
        found = of_rank["beside"]
        assert found["saved"] == found["trained"] == []
        assert len(found["changed"]) > 10


def test_a_checkpoint_is_announced_when_it_is_complete_and_the_next_one_waits_for_it(
    ran: list[dict[str, Any]],
) -> None:
    for of_rank in ran:
        assert of_rank["beside"]["began"] == [False, False]
        assert of_rank["beside"]["done"] == [True, True]


def test_training_waits_for_checkpoints_from_when_one_host_lacks_memory_for_copies(
    ran: list[dict[str, Any]],
) -> None:
    assert [of_rank["short"] for of_rank in ran] == [[True, True], [True, True]]


def test_a_rank_that_could_not_write_fails_the_checkpoint_on_every_rank(
    ran: list[dict[str, Any]],
) -> None:
    for of_rank in ran:
        found = of_rank["failed"]
        assert found["said"].startswith("RunDirectoryError: cannot write the checkpoint")
        assert "the disk is full" in found["said"]
        assert found["left"] == ["step-000001"]
        assert not found["done"]
        assert not found["failed"], "it was raised"


def test_a_checkpoint_follows_a_run_directory_that_is_moved_while_it_is_written(
    ran: list[dict[str, Any]],
) -> None:
    for of_rank in ran:
        found = of_rank["moved"]
        assert (found["said"], found["kept"], found["is_back"]) == ("", [[2]], False)
        assert found["folder"].endswith("/moved/checkpoints")
        assert find_damage(Path(found["folder"]) / "step-000002") == ""


def test_a_run_directory_that_is_removed_while_a_checkpoint_is_written_is_named_on_every_rank(
    ran: list[dict[str, Any]],
) -> None:
    for of_rank in ran:
        found = of_rank["removed"]
        assert "gone/checkpoints/step-000002 was removed while this run used it" in found["said"]
        assert (found["kept"], found["is_back"]) == ([], False)
