"""Whole runs whose model and data are named on a hub, which serves this machine only."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hub_folders import DATA, MODEL, write_data_set
from local_hub import serve_hub
from run_assets import write_assets
from whole_runs import start_run, write_config

pytestmark = [pytest.mark.process, pytest.mark.slow]

SETTINGS = (f"model.path={MODEL}", f"data.train={DATA}/main", "data.prompt_column=question")


def test_two_ranks_train_on_what_one_of_them_downloads(tmp_path: Path) -> None:
    write_assets(tmp_path / "assets")
    shutil.copytree(tmp_path / "assets" / "model", tmp_path / "hub" / "models" / MODEL)
    write_data_set(tmp_path / "hub")
    write_config(tmp_path, tmp_path / "none")

    with serve_hub(tmp_path / "hub") as hub:
        environ = hub.environment(tmp_path / "home")
        with start_run(tmp_path, *SETTINGS, environ=environ, is_forked=False) as run:
            ended = run.wait()

    assert ended.status == 0, run.output
    assert set(Counter(hub.downloads()).values()) == {1}
    recorded = json.loads((run.run_dir / "settings.json").read_text())["settings"]
    assert Path(recorded["model"]["path"]).is_relative_to(tmp_path / "home")
    assert Path(recorded["data"]["train"]).is_relative_to(tmp_path / "home")
