"""The command that makes the quickstart's files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from umbra.runtime.disk import explain, os_error_behind
from umbra.trainer.quickstart.quickstart_assets import ensure_assets
from umbra.trainer.reporting.progress_display import ProgressDisplay


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the files if they are missing or out of date, and prints what it did."""
    parser = argparse.ArgumentParser(
        prog="python -m umbra.trainer.quickstart",
        description="Make the quickstart's model, tokenizer and data sets (once).",
    )
    parser.add_argument("out_dir", type=Path, help="folder to make them in")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and warm-up")
    arguments = parser.parse_args(argv)
    display = ProgressDisplay(sys.stderr)
    try:
        with display, display.activity("making the quickstart's model and data sets"):
            is_made = ensure_assets(arguments.out_dir, arguments.seed)
    except Exception as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        reason = explain(cause, arguments.out_dir, or_else=", or give another folder")
        raise SystemExit(f"quickstart: cannot write {arguments.out_dir}: {reason}") from error
    if is_made:
        print(f"quickstart: made model and data sets in {arguments.out_dir}")
    else:
        print(f"quickstart: model and data sets in {arguments.out_dir} are up to date")
