"""The example in docs/data-and-rewards.md runs, with a hub of this machine that has small things by
the names that the example uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from documented_examples import files_of, sessions_of
from hub_folders import DATA, MODEL, write_data_set
from local_hub import serve_hub
from run_traces import RunTraces
from training_models import save_model

DOCUMENT = "data-and-rewards.md"
SMALLER = {
    "Qwen/Qwen3-0.6B": MODEL,
    "openai/gsm8k": DATA,
    "max_new_tokens = 512": "max_new_tokens = 8\ngroups_per_step = 8",  # as the data set has rows
    "steps = 200": "steps = 2",
    "step-000200": "step-000002",
}
LIMIT_S = 300.0


def smaller(text: str) -> str:
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return text


@pytest.mark.slow
@pytest.mark.process
def test_the_commands_run_one_after_the_other(tmp_path: Path) -> None:
    save_model(tmp_path / "hub" / "models" / MODEL)
    write_data_set(tmp_path / "hub")
    folder = tmp_path / "work"
    folder.mkdir()
    for name, text in files_of(DOCUMENT).items():
        (folder / name).write_text(smaller(text))
    script = sessions_of(DOCUMENT)[0][0]

    with serve_hub(tmp_path / "hub") as hub, RunTraces() as traces:
        environ = hub.environment(tmp_path / "home") | traces.environment
        environ |= {"PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-euc", smaller(script)],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
    assert (folder / "my-model" / "model.safetensors").exists()
