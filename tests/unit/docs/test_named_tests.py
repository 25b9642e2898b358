"""Tests and files of tests that documents name are there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
]
NAMED = re.compile(r"(tests/(?!\S*NAME)[\w/]+\.py)(?:::(\w+))?")


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text()


def is_there(path: str, test: str) -> bool:
    if not (ROOT / path).is_file():
        return False
    return not test or re.search(rf"^(async )?def {test}\(", source(path), re.M) is not None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_names_only_tests_that_are_there(document: str) -> None:
    named = set(NAMED.findall(source(document)))

    assert [name for name in sorted(named) if not is_there(*name)] == []


def test_names_of_tests_are_found_in_documents() -> None:
    assert len(set(NAMED.findall(source("docs/faults.md")))) > 50
