"""docs/faults.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_every_test_that_proves_a_fault_is_there() -> None:
    page = (REPOSITORY / "docs/faults.md").read_text()
    named = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)))

    assert len(named) > 100
    assert [f"{file}::{name}" for file, name in named if not _has(REPOSITORY / file, name)] == []


def _has(file: Path, name: str) -> bool:
    return file.is_file() and f"def {name}(" in file.read_text()
