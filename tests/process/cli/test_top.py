"""`umbra top` of a run that has ended, in a terminal and without one."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watching import DEADLINE_S

from umbra.runtime.cli.umbra_command import main

pytestmark = pytest.mark.process


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    row = {"step": 3, "time": time.time(), "time/step_s": 1.5, "rollout/reward_mean": 0.25}
    cut = json.dumps(row)[:20]  # as a reader may find the line that is being written
    evaluation = json.dumps({"step": 3, "time": 0, "eval/accuracy": 0.5})
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(row)}\n{evaluation}\n{cut}")
    settings = {"folder": "/", "settings": {"train": {"steps": 3}}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    event = {"time": 0.0, "kind": "stop", "who": "rank 0", "text": "rank 0 got SIGINT"}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n{")
    return tmp_path


def test_the_files_of_an_ended_run_are_shown_as_plain_text(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(run_dir)]) == 0

    shown = capsys.readouterr().out
    assert "step 3/3   [####################]   last step 0:0" in shown
    assert "reward 0.250\n" in shown
    assert "no job of this run is running on this machine\n" in shown
    assert "stop   rank 0  rank 0 got SIGINT\n" in shown
    assert "\x1b" not in shown


def test_characters_that_the_terminal_does_not_have_are_escaped(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"time": 0.0, "kind": "note", "who": "größe", "text": "→ 7"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))

    assert main(["top", str(run_dir), "--once"]) == 0

    assert "größe  \\u2192 7".encode("latin-1") in written.getvalue()


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "events.jsonl").unlink()
    (run_dir / "events.jsonl").mkdir()

    assert main(["top", str(run_dir), "--once"]) == 1

    message = f"umbra: cannot use {run_dir}/events.jsonl: Is a directory\n"
    assert capsys.readouterr().err == message


def read_more(terminal: int) -> bytes:
    """What is shown next; b"" once the program has closed the terminal."""
    ready, _, _ = select.select([terminal], [], [], DEADLINE_S)
    assert ready, "nothing more was shown"
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.slow
def test_ctrl_c_leaves_the_terminal_as_it_was(run_dir: Path) -> None:
    ours, theirs = pty.openpty()
    # SIGINT is ignored in what a shell script starts in the background, such as these tests.
    python = ("env", "--default-signal=INT", "TERM=xterm", sys.executable)
    command = [*python, "-m", "umbra.runtime.cli.umbra_command", "top", str(run_dir)]
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            while b"step 3/3" not in shown:
                shown += read_more(ours)
            process.send_signal(signal.SIGINT)
            while more := read_more(ours):
                shown += more
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            os.close(ours)

    assert process.returncode == 0
    assert shown.startswith(b"\x1b[?1049h")  # the second screen, then no cursor
    assert shown.endswith(b"\x1b[?1049l")
    assert shown.rindex(b"\x1b[?25h") > shown.index(b"\x1b[?25l")
    assert b"Traceback" not in shown
