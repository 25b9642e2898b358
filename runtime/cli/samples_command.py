"""`umbra samples RUN_DIR`: shows samples of a job as text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Final

from umbra.runtime.cli.ledger_command import find_sample, open_index
from umbra.runtime.cli.sample_texts import read_texts, text_of
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.sample_table import SampleRow

_DEFAULT_LIMIT: Final = 3
"""Samples shown by default. More would scroll out of the screen; fewer do not show what varies."""


def run(arguments: argparse.Namespace) -> int:
    """Prints text, or with `--json` one object. Works while the job runs, too."""
    if arguments.ids and (arguments.step or arguments.best or arguments.worst):
        raise ConfigError("samples given by id need no --step, --best or --worst: leave them out")
    run_dir = Path(arguments.run_dir)
    index = open_index(run_dir)
    rows, choice = _choose(index, arguments)
    samples = read_texts(index, rows, run_dir, arguments.model)
    if arguments.json:
        print(json.dumps({"samples": samples}))
        return 0
    print("\n\n".join([*map(text_of, samples), *filter(None, [choice])]))
    return 0


def _choose(index: LedgerIndex, arguments: argparse.Namespace) -> tuple[list[SampleRow], str]:
    """The rows of the wanted samples, and a line about the others."""
    if arguments.ids:
        return [find_sample(index, sample_id) for sample_id in arguments.ids], ""
    step = None if arguments.step is None else arguments.step - 1
    if arguments.best or arguments.worst:
        what, of = ("best" if arguments.best else "worst"), "samples with a reward"
        limit = arguments.best or arguments.worst
        rows, num_samples = index.extremes(limit, best=bool(arguments.best), step=step)
    else:
        what, of = "newest", "samples with a completion; choose by id, --best N or --worst N"
        rows, num_samples = index.with_tokens(_DEFAULT_LIMIT, step)
    if not rows:
        if step is not None and (steps := index.steps()):
            return (
                [],
                f"no samples of step {step + 1}: there are steps {steps[0] + 1} to {steps[1] + 1}",
            )
        return [], "no such samples yet"
    of_step = "" if step is None else f" of step {step + 1}"
    return rows, f"the {what} {len(rows):,}{of_step}, of {num_samples:,} {of}"
