"""Ranks that start without importing torch again, and a library in NVML's place."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_nvml import fake_nvml
from forked_ranks import start_fork

from umbra.runtime.testing.distributed_world import DistributedWorld

__all__ = ["fake_nvml", "umbra_distributed_world"]


@pytest.fixture
def umbra_distributed_world(
    request: pytest.FixtureRequest, tmp_path: Path, fork_server: None
) -> DistributedWorld:
    """Like the plugin's fixture of this name, whose ranks are new interpreters."""
    node: pytest.Item = request.node
    if node.get_closest_marker("gpu"):  # CUDA does not survive a fork
        return DistributedWorld(tmp_path)
    return DistributedWorld(tmp_path, start_fork)
