"""Runs every mutant's command on the mutant, where it has to fail, and on an unchanged copy.

    python tests/faults/mutants/mutants.py [NAME ...]

Prints a table: the mutant, the command that caught it, what that said, seconds. Exit status 1 where
a mutant is not caught, or is for another reason than its own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mutant import Mutant, MutantError, Outcome, copy_repository, read_mutants, run_command

MUTANTS: Final = read_mutants(Path(__file__).with_suffix(".txt"))
_ROOT: Final = Path(__file__).parents[3]
_TAIL_LINES: Final = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where all are caught, 1 where not, 2 for a name that no mutant has."""
    parser = argparse.ArgumentParser(
        prog="python tests/faults/mutants/mutants.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants (default: all)")
    names: list[str] = parser.parse_args(argv).names
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"mutants: no mutant {unknown[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    print("| mutant | caught by | what it said | seconds |\n|---|---|---|---|", flush=True)
    problems: list[str] = []
    for verdict in try_all([known[name] for name in names or known], _ROOT):
        print(verdict.row(), flush=True)
        if verdict.problem:
            problems.append(verdict.problem)
    for problem in problems:
        print(f"mutants: {problem}", file=sys.stderr)
    print(f"mutants: {'failed' if problems else 'passed: every mutant was caught'}")
    return 1 if problems else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a mutant, or of a command without one.

    Attributes:
        said: how the command showed that it noticed; else how it ended.
        problem: what is not as it should be; "" where all is well.
    """

    name: str
    command: str
    said: str
    wall_s: float
    problem: str

    def row(self) -> str:
        return f"| {self.name} | {self.command} | {self.said} | {self.wall_s:.0f} |"


def try_all(mutants: Sequence[Mutant], root: Path) -> Iterator[Verdict]:
    """Tries each command without a mutant first, and then the mutants in order.

    A command without a mutant runs in the copy of which the others are made, so that they need not
    compile what it has.
    """
    with tempfile.TemporaryDirectory(prefix="umbra-mutants-", dir="/tmp") as name:
        original, copy = Path(name, "original"), Path(name, "copy")
        copy_repository(root, original)
        tried: set[Sequence[str]] = set()
        for mutant in mutants:
            if mutant.command not in tried:
                tried.add(mutant.command)
                yield _without(mutant.command, run_command(original, mutant.command))
            try:
                outcome = _run_in_copy(original, copy, mutant)
            except MutantError as error:
                yield Verdict(name=mutant.name, command="", said="", wall_s=0.0, problem=str(error))
            else:
                yield _judged(mutant, outcome)


def _run_in_copy(original: Path, copy: Path, mutant: Mutant) -> Outcome:
    copy_repository(original, copy)
    try:
        mutant.apply(copy)
        return run_command(copy, mutant.command)
    finally:
        shutil.rmtree(copy)


def _without(command: Sequence[str], outcome: Outcome) -> Verdict:
    text, ending = " ".join(command), _ending(outcome)
    problem = "" if outcome.status == 0 else f"without a mutant, {text} {ending}:{_tail(outcome)}"
    return Verdict(name="(none)", command=text, said=ending, wall_s=outcome.wall_s, problem=problem)


def _judged(mutant: Mutant, outcome: Outcome) -> Verdict:
    text, ending = " ".join(mutant.command), _ending(outcome)
    line = outcome.line_with(mutant.says)
    is_caught = outcome.status not in (0, None) and bool(line)
    problem = (
        f"{mutant.name!r} was not caught: {text} {ending} and "
        f"{'said' if line else 'did not say'} {mutant.says!r}:{_tail(outcome)}"
    )
    return Verdict(
        name=mutant.name,
        command=text,
        said=line if is_caught else ending,
        wall_s=outcome.wall_s,
        problem="" if is_caught else problem,
    )


def _ending(outcome: Outcome) -> str:
    if outcome.status is None:
        return "did not end"
    return "passed" if outcome.status == 0 else f"failed with status {outcome.status}"


def _tail(outcome: Outcome) -> str:
    return "".join(f"\n    {line}" for line in outcome.output.splitlines()[-_TAIL_LINES:])


if __name__ == "__main__":
    sys.exit(main())
