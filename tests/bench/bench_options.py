"""The command-line options that several benchmark scripts have."""

from __future__ import annotations

import argparse


def options_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with `--rounds`; its description is the docstring's first line."""
    parser = argparse.ArgumentParser(description=(docstring or "").partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=5, help="for medians (default 5)")
    return parser


def positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number
