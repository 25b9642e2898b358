"""The `umbra` command distinguishes wrong use from failure, and names the remedy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

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
        ([], "COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["ledger", "runs/a", "--newest", "0"], "'0' is not a positive whole number"),
        (["samples", "runs/a", "--step", str(1 << 63)], "is not a positive whole number below"),
        (["replay", "runs/a", "--steps", "1-5"], "below 2**63: use A:B, such as 10:12"),
        (["dataset", "runs/a", "--best", "5", "-o", "best.csv"], "end the name with .jsonl"),
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

    monkeypatch.setattr("umbra.runtime.cli.stop_command.run", command)

    with pytest.raises(BrokenPipeError):
        run_main("stop", "run")


def test_no_output_at_all_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as `umbra ... >&-` finds it

    assert run_main("--version") == 0


@pytest.mark.process
def test_the_command_loads_no_heavy_module_before_it_is_needed() -> None:
    code = (
        "import sys, umbra.runtime.cli.umbra_command as m\n"
        "try: m.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'rich', 'pydantic'} & sys.modules.keys()))"
    )

    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=30
    )

    assert shown.stdout.decode().splitlines()[-1] == "[]"
