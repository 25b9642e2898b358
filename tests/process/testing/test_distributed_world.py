"""The fixture that runs a function in n processes with torch.distributed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from umbra.runtime.testing.distributed_world import DistributedWorld, RankFailed

pytest.importorskip("torch")
import world_functions
from forked_ranks import start_fork

pytestmark = pytest.mark.process


@pytest.fixture
def world(tmp_path: Path, fork_server: None) -> DistributedWorld:
    """Like the plugin's fixture, but its ranks need not import torch."""
    return DistributedWorld(tmp_path, start_fork)


@pytest.mark.slow
def test_every_rank_runs_and_results_come_in_order(
    umbra_distributed_world: DistributedWorld,
) -> None:
    assert umbra_distributed_world(world_functions.add_up, 1, num_ranks=3) == [6.0, 6.0, 6.0]


@pytest.mark.slow
def test_arrays_travel_both_ways(world: DistributedWorld) -> None:
    values = np.arange(10_000, dtype=np.float32)

    (doubled,) = world(world_functions.double, values, num_ranks=1)

    np.testing.assert_array_equal(doubled, values * 2)


@pytest.mark.slow
def test_a_rank_that_raises_is_named_with_its_traceback(
    world: DistributedWorld,
) -> None:
    with pytest.raises(RankFailed, match="rank 1: ValueError: rank 1 had enough") as caught:
        world(world_functions.raise_on, 1)

    assert caught.value.rank == 1
    assert "in raise_on\n" in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_its_output(
    umbra_distributed_world: DistributedWorld,
) -> None:
    with pytest.raises(RankFailed, match=r"killed by SIGKILL \(9\)(.|\n)*about to die"):
        umbra_distributed_world(world_functions.die_on, 1)


@pytest.mark.slow
def test_a_late_rank_is_ended_and_its_stack_shown(
    umbra_distributed_world: DistributedWorld,
) -> None:
    with pytest.raises(RankFailed, match="was not done within 6 s") as caught:
        umbra_distributed_world(world_functions.sleep_on, 0, num_ranks=1, timeout_s=6.0)

    # Where it was, sleeping or still on its way there, depends on the machine.
    assert re.search(r'File ".*distributed_world.py", line \d+ in main', str(caught.value))


@pytest.mark.slow
def test_what_cannot_travel_is_refused_by_name(world: DistributedWorld) -> None:
    with pytest.raises(RankFailed, match="TypeError: cannot send a Tensor"):
        world(world_functions.return_a_tensor, num_ranks=1)
    with pytest.raises(ValueError, match="define it at the top of a module"):
        world(lambda: None)


def test_a_rank_whose_test_has_ended_before_it_began_ends_at_once(tmp_path: Path) -> None:
    test = subprocess.Popen([sys.executable, "-c", ""])
    test.wait(30.0)
    command = [sys.executable, "-m", "umbra.runtime.testing.distributed_world", str(test.pid)]

    rank = subprocess.run(
        [*command, str(tmp_path / "call"), str(tmp_path / "outcome")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60.0,
        check=False,
    )

    assert (rank.returncode, rank.stderr) == (1, "the test has ended: exiting\n")
