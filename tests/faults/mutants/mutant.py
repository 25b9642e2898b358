"""A mutant: one change to a copy of the repository, and the command that has to notice it.

A test that no mistake makes fail proves nothing. A mutant is such a mistake, kept in mutants.txt:

    $ -m pytest -q -x tests/unit/example.py

    name
    # What goes wrong, if the name does not say it.
    path/of/the/file.py
    -what stands there
    +what replaces it
    ! what the command says

A command is for all mutants up to the next one. Lines of old and new text are without what is left
out before the first and behind the last.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final

from umbra.runtime.errors import UmbraError

_LIMIT_S: Final = 300.0
_STOP_S: Final = 30.0
"""For a command that took too long to end its processes."""
_NOT_COPIED: Final = shutil.ignore_patterns(".*", "*.egg-info", "build", "runs")


class MutantError(UmbraError):
    """A mutant that cannot be made, or a command that fails without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mistake in one file.

    Attributes:
        path: of the file, from the repository's root.
        old, new: what stands there exactly once, and what replaces it.
        command: arguments of Python, run in the copy's root. It has to succeed without the
            mistake, and to fail with it.
        says: a regular expression that is found in what it then prints, in one line.
    """

    name: str
    path: str
    old: str
    new: str
    command: Sequence[str]
    says: str

    def apply(self, root: Path) -> None:
        """Makes the mistake in a copy.

        Raises:
            MutantError: `old` does not stand there exactly once.
        """
        path = root / self.path
        text = path.read_text() if path.is_file() else ""
        count = text.count(self.old)
        if count != 1:
            raise MutantError(
                f"mutant {self.name!r}: its old text stands {count} times in {self.path}, not "
                "once: fit it to the file as it is now"
            )
        path.write_text(text.replace(self.old, self.new))
        # Bytecode of a file of the same size and second would count as the file's own.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a command.

    Attributes:
        status: its exit status; None where it ran too long.
        output: all that it printed.
    """

    status: int | None
    output: str
    wall_s: float

    def line_with(self, pattern: str) -> str:
        """The first line of the output in which the expression is found; "" where there is none."""
        lines = (line for line in self.output.splitlines() if re.search(pattern, line))
        return next(lines, "")


def read_mutants(path: Path) -> Sequence[Mutant]:
    """In the order of the file."""
    mutants: list[Mutant] = []
    command: Sequence[str] = ()
    for block in path.read_text().rstrip("\n").split("\n\n"):
        if block.startswith("$ "):
            command = tuple(shlex.split(block[2:]))
            continue
        name, *lines = block.splitlines()
        texts = {sign: [line[1:] for line in lines if line[0] == sign] for sign in "-+!"}
        mutants.append(
            Mutant(
                name=name,
                path=next(line for line in lines if line[0] not in "#-+!"),
                old="\n".join(texts["-"]),
                new="\n".join(texts["+"]),
                command=command,
                says="".join(texts["!"]).strip(),
            )
        )
    return mutants


def copy_repository(source: Path, target: Path) -> None:
    """Without what is hidden or made, but bytecode; its links (src/umbra) point into the copy."""
    shutil.copytree(source, target, symlinks=True, ignore=_NOT_COPIED)


def run_command(root: Path, command: Sequence[str], limit_s: float = _LIMIT_S) -> Outcome:
    """Runs Python in a copy, on the copy's umbra."""
    began = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=root,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            status = process.returncode
        except subprocess.TimeoutExpired:
            output, status = _stop(process), None
        return Outcome(status=status, output=output, wall_s=time.monotonic() - began)


def _stop(process: subprocess.Popen[str]) -> str:
    """Ends it, gently if it takes the hint; what it had printed."""
    process.terminate()
    try:
        return process.communicate(timeout=_STOP_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
