"""Ranks of a `DistributedWorld` as forks of a process that has imported torch and the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from preloaded_python import PreloadedProcess


def start_fork(
    command: Sequence[str], environment: Mapping[str, str], output_path: Path
) -> PreloadedProcess:
    """A `StartRank`; needs the fixture `fork_server`."""
    return PreloadedProcess(command, Path.cwd(), environment, output_path)
