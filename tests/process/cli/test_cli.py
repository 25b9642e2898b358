"""The command line as users call it, and `umbra top`."""

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


def run_main(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--version") == 0

    assert capsys.readouterr().out.startswith("umbra 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "generate  one completion\n"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["ledger", "runs/a", "--newest", "0"], "'0' is not a positive whole number"),
        (["samples", "runs/a", "--step", str(1 << 63)], "is not a positive whole number below"),
        (["replay", "runs/a", "--steps", "1-5"], "below 2**63: use A:B, such as 10:12"),
        (["dataset", ".", "--best", "5", "-o", "best.csv"], "end the name with .jsonl"),
        (["serve"], "required: CONFIG\n"),
        (["serve", "a.toml", "--prot", "8", "pool.count=2"], "unrecognized arguments: --prot"),
        (["generate", "--prompt", "\udcff"], "--prompt: is not text"),
    ],
)
def test_wrong_use_exits_with_2_and_names_the_cause(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*argv) == 2

    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["serve", "--help"]])
def test_output_that_nobody_reads_ends_a_command_quietly(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    with open(writing, "w") as unread:  # closing it writes what it holds
        monkeypatch.setattr(sys, "stdout", unread)
        status = run_main(*argv)

    assert status == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_another_pipe_that_breaks_is_an_error_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("umbra.runtime.cli.job_commands.run", command)

    with pytest.raises(BrokenPipeError):
        run_main("stop", ".")


def test_no_output_at_all_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as `umbra ... >&-` finds it

    assert run_main("--version") == 0


@pytest.mark.process
def test_the_command_loads_no_heavy_module_before_it_is_needed() -> None:
    code = (
        "import sys, importlib, umbra.runtime.cli.umbra_command as m\n"
        "try: m.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'rich', 'pydantic'} & sys.modules.keys()))\n"
        "for command in m.COMMANDS:\n"
        "  if command.name not in ('doctor', 'export'):  # which compute\n"
        "    importlib.import_module(command.target.partition(':')[0])\n"
        "    assert 'torch' not in sys.modules, command.name\n"
    )

    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=60
    )

    assert shown.stdout.decode().splitlines()[-1] == "[]"


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


@pytest.mark.parametrize(
    ("argv", "lacks"),
    [
        (["ledger"], "samples\n"),
        (["samples"], "samples\n"),
        (["dataset", "--best", "1"], "samples\n"),
        (["replay", "--steps", "1:2"], "samples\n"),
        (["trace"], "trace\n"),
        (["top"], "supervisor: umbra plot and umbra dash show its metrics\n"),
        (["dump"], "supervisor to ask\n"),
        (["drain", "node-1"], "supervisor to ask\n"),
        (["stop"], "supervisor to ask: use Ctrl-C, or SIGTERM for torchrun\n"),
        (["preempt"], "supervisor to ask: use Ctrl-C, or SIGTERM for torchrun\n"),
    ],
)
def test_a_command_names_what_a_run_of_sft_lacks(
    run_dir: Path, argv: list[str], lacks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"folder": "/", "settings": {"train": {"steps": 3}, "sft": {"batch_size": 64}}}
    (run_dir / "settings.json").write_text(json.dumps(settings))

    assert main([argv[0], str(run_dir), *argv[1:]]) == 2

    said = f"umbra: {run_dir} is a run of SFT, which has no {lacks}"
    assert capsys.readouterr().err == said
    assert main([argv[0], str(run_dir / "none"), *argv[1:]]) == 2
    assert f"there is no folder {run_dir / 'none'}: give" in capsys.readouterr().err


@pytest.mark.process
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


@pytest.mark.process
def test_characters_that_the_terminal_does_not_have_are_escaped(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {"time": 0.0, "kind": "note", "who": "größe", "text": "→ 7"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))

    assert main(["top", str(run_dir), "--once"]) == 0

    assert "größe  \\u2192 7".encode("latin-1") in written.getvalue()


@pytest.mark.process
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


@pytest.mark.process
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
