"""The command-line options that several benchmark scripts have."""

from __future__ import annotations

import argparse


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


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number
