"""A model and data that all runs share, and a folder for each run."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_assets import write_assets
from whole_runs import write_config


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Path:
    """Holds model/ and train.jsonl, see `write_assets`."""
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, assets: Path) -> Path:
    """The current folder of a run: its config.toml is there."""
    write_config(tmp_path, assets)
    return tmp_path
