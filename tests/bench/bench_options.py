"""The command-line options that several benchmark scripts have."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

_PEERS: Final = Path(__file__).resolve().parents[2] / ".venv-bench" / "bin" / "python"
_TRY_TIMEOUT_S: Final = 30.0


def options_parser(docstring: str | None, rounds: int = 5) -> argparse.ArgumentParser:
    """A parser with `--json` and `--rounds`; its description is the docstring's first line."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=rounds,
        help=f"medians are over so many rounds (default {rounds})",
    )
    return parser


def add_peer_python(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer-python",
        type=_interpreter,
        default=str(_PEERS) if _PEERS.exists() else sys.executable,
        metavar="PATH",
        help="interpreter that has the peers (default: the one of `make bench`, else this one)",
    )


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def _interpreter(path: str) -> str:
    """Absolute, with its links kept: a virtual environment's interpreter is one."""
    try:
        subprocess.run(
            [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"],
            check=True,
            capture_output=True,
            timeout=_TRY_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise argparse.ArgumentTypeError(
            f"{path} is not Python 3.11 or later ({error}). Make the peers' environment with "
            "`make bench`, or leave the option out."
        ) from error
    return os.path.abspath(path)
