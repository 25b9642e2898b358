"""The cluster that all tests here share."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_programs

from umbra.trainer.quickstart.quickstart_assets import ensure_assets


@pytest.fixture(scope="session")
def slurm() -> Generator[SlurmCluster]:
    if missing := missing_programs():
        pytest.fail(
            f"not installed: {', '.join(missing)}; run: apt-get install -y slurm-wlm munge",
            pytrace=False,
        )
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data sets."""
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    ensure_assets(folder, seed=0)
    return folder
