"""A fork of `preloaded_python` is what a new interpreter would be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded_python import PreloadedProcess

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize("end", ["0", "3", "raise", "message"])
def test_a_fork_is_like_a_new_process(tmp_path: Path, fork_server: None, end: str) -> None:
    report, output = tmp_path / "report.json", tmp_path / "output.txt"
    command = [sys.executable, "-u", "-m", "reported_process", str(report), end]
    inherited = os.environ.get("PYTHONPATH", "")
    paths = (str(Path(__file__).parent), inherited)
    variables = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LC_ALL": "C.UTF-8",  # otherwise Python adds LC_CTYPE
        "OMP_NUM_THREADS": "1",
    }

    with output.open("wb") as file:
        status = subprocess.run(
            command,
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=60,
            check=False,
        ).returncode
    expected, said = json.loads(report.read_text()), output.read_text().splitlines()[-1:]
    report.unlink()
    fork = PreloadedProcess(command, tmp_path, variables, output)

    assert fork.wait(60.0) == status
    assert output.read_text().splitlines()[-1:] == said
    assert json.loads(report.read_text()) == expected
