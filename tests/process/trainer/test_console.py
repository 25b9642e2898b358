"""Processes whose stdout and stderr can no longer be written."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PREAMBLE = """
import logging, os, subprocess, sys, traceback
from pathlib import Path
from umbra.trainer.reporting.console import Console
console = Console.install()
log = Path(sys.argv[1])
def say_much():
    print("to stdout", flush=True)
    print("to stderr", file=sys.stderr)
    logging.warning("logged")
    traceback.print_exception(ValueError("shown"))
    sys.stderr.flush()
"""


def start(
    code: str, log: Path, stdout: int | None, stderr: int | None = None, closing: str = ""
) -> subprocess.Popen[bytes]:
    """Runs `code` with these streams; `closing` are redirections such as `>&-`."""
    program = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), str(log)]
    in_shell = ["sh", "-c", f'exec "$@" {closing}', "sh", *program]
    return subprocess.Popen(in_shell, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)


def end(process: subprocess.Popen[bytes]) -> int:
    """The exit status once its stdin is closed."""
    process.communicate(timeout=30)
    return process.returncode


def test_a_dead_reader_costs_the_text_and_one_line_of_the_log_a_stream(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    reading, writing = os.pipe()
    code = """
        print("ready", flush=True)
        sys.stdin.read()
        say_much()  # before the log is known
        console.log_losses(log, "rank 3")
        say_much()
    """
    with start(code, log, stdout=writing, stderr=writing) as process:
        os.close(writing)
        assert os.read(reading, 100) == b"ready\n"
        os.close(reading)

        assert end(process) == 0

    first, second = log.read_text().splitlines()
    assert "rank 3: stdout cannot be written (Broken pipe)" in first
    assert "rank 3: stderr cannot be written (Broken pipe)" in second


def test_a_vanished_terminal_costs_the_text_alone(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    window_end, terminal = os.openpty()
    code = """
        console.log_losses(log, "rank 0")
        print(sys.stderr.isatty(), flush=True)
        sys.stdin.read()
        say_much()
    """
    with start(code, log, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        assert os.read(window_end, 100) == b"True\r\n"
        os.close(window_end)

        assert end(process) == 0

    assert log.read_text().count("cannot be written (Input/output error)") == 2


def test_a_full_disk_costs_the_text_alone(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    code = """
        say_much()
        console.log_losses(log, "rank 0")
    """
    with start(code, log, None, closing=">/dev/full 2>&1") as process:
        assert end(process) == 0

    assert log.read_text().count("cannot be written (No space left on device)") == 2


def test_a_reader_that_is_behind_a_nonblocking_pipe_costs_the_text_alone(tmp_path: Path) -> None:
    """Whoever shares a terminal or pipe may make it non-blocking for all, as Node.js does."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    code = """
        for _ in range(1000):
            print("x" * 1000)
        say_much()
    """
    with start(code, tmp_path / "run.log", stdout=writing, stderr=writing) as process:
        os.close(writing)
        try:
            assert end(process) == 0
        finally:
            os.close(reading)


@pytest.mark.parametrize("closing", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_what_is_printed_to_closed_streams_reaches_no_file(tmp_path: Path, closing: str) -> None:
    log = tmp_path / "run.log"
    code = """
        console.log_losses(log, "rank 0")
        with open(log.with_name("opened"), "w") as opened:
            say_much()
            os.write(1, b"by a library")
            os.write(2, b"by a library")
            subprocess.run(["sh", "-c", "echo by a child; echo by a child >&2"], check=True)
            assert opened.fileno() > 2, opened.fileno()
    """
    with start(code, log, subprocess.DEVNULL, subprocess.DEVNULL, closing) as process:
        assert end(process) == 0

    assert (tmp_path / "opened").read_text() == ""
    assert not log.exists(), "nothing was lost that anybody wanted"


def test_streams_in_order_are_as_they_were(tmp_path: Path) -> None:
    code = """
        print("é", "\\udcff", file=sys.stderr)
        print("to stdout", end="\\r")
        os.write(1, b"after it")
    """
    pipe = subprocess.PIPE
    with start(code, tmp_path / "run.log", stdout=pipe, stderr=pipe) as process:
        output, errors = process.communicate(timeout=30)

    assert output == b"to stdout\rafter it"
    assert errors.decode() == "é \\udcff\n"
