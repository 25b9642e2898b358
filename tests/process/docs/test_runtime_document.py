"""The examples in docs/runtime.md run as written, print what it shows, and leave nothing behind."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from documented_examples import files_of, sessions_of
from run_traces import RunTraces

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = "runtime.md"
SESSIONS = sessions_of(DOCUMENT)
LIMIT_S = 150.0
ENDING_S = 5.0


def name_of(session: tuple[str, list[str]]) -> str:
    """The file that its script runs."""
    (name,) = set(re.findall(r"\w+\.py", session[0]))
    return name


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def rest_of(output: str, shown: list[str]) -> str:
    """What is left of the output without the lines that are shown.

    Their order may differ. Ranks write a line and its end separately, so that two lines may touch.
    """
    for line in shown:
        pattern = ".*?".join(re.escape(part) for part in line.split("…"))
        pattern += "[^\\n]*" if line.endswith("…") else ""
        output, num_found = re.subn(pattern, "", output, count=1)
        assert num_found == 1, f"{line!r} is not in the output: {output}"
    return output.strip()


def test_every_file_is_run_or_used_by_one_that_is() -> None:
    run = {name_of(session) for session in SESSIONS}

    assert files_of(DOCUMENT).keys() - run == {"replay.py", "pyproject.toml"}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("session", SESSIONS, ids=name_of)
def test_an_example_prints_what_is_shown_and_leaves_nothing(
    session: tuple[str, list[str]], tmp_path: Path
) -> None:
    script, shown = session
    if "torchrun" in script:
        pytest.importorskip("torch")
    for name, text in files_of(DOCUMENT).items():
        (tmp_path / name).write_text(text)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

    with RunTraces() as traces:
        done = subprocess.run(
            ["bash", "-e", "-c", script.replace("29400", str(free_port()))],
            cwd=tmp_path,
            env={**os.environ, **traces.environment, "PATH": path, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert rest_of(done.stdout, shown) == "", done.stdout
        assert traces.find(ENDING_S) == []
