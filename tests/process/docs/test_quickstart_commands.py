"""Commands of several pages run as written, on a small model in the quickstart's place."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from documented_examples import files_of, sessions_of
from run_traces import RunTraces
from small_quickstart import write_assets

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 150.0

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clone after `make quickstart`, as far as the commands see it."""
    assets = tmp_path / "runs/quickstart-assets"
    write_assets(assets)
    shutil.copytree(assets / "model", tmp_path / "runs/quickstart/export")
    shutil.copytree(ROOT / "launch/configs", tmp_path / "launch/configs")
    return tmp_path


@contextmanager
def shell(script: str, folder: Path, traces: RunTraces) -> Generator[subprocess.Popen[str]]:
    """Killed at the end of the block, if it has not ended by then."""
    bin_dir = Path(sys.executable).parent
    process = subprocess.Popen(
        ["bash", "-euc", script],
        cwd=folder,
        env=os.environ | traces.environment | {"PATH": f"{bin_dir}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def run(script: str, folder: Path, traces: RunTraces) -> str:
    with shell(script, folder, traces) as process:
        output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("document", ["add-an-algorithm.md", "asynchronous.md"])
def test_a_training_runs(document: str, folder: Path) -> None:
    for name, text in files_of(document).items():
        (folder / name).write_text(text)
    ((script, _),) = sessions_of(document)

    with RunTraces() as traces:
        output = run(f"{script} train.steps=2", folder, traces)

    assert "done: 2 steps" in output


def test_a_model_is_served_and_asked(folder: Path) -> None:
    (server, _), (clients, _) = sessions_of("serving.md")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    with RunTraces() as traces, shell(server.replace("8000", port), folder, traces) as serving:
        assert serving.stdout is not None
        assert any(f"http://127.0.0.1:{port}/v1" in line for line in serving.stdout)
        answers = run(clients.replace("8000", port), folder, traces)
        serving.send_signal(signal.SIGINT)
        output = serving.communicate(timeout=LIMIT_S)[0]

    assert serving.returncode == 0, output
    assert answers
