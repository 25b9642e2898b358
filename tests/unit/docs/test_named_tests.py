"""The tests that documents and tests/faults.tsv name exist, as do the messages of a page."""

from __future__ import annotations

import csv
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


def faults() -> list[dict[str, str]]:
    lines = source("tests/faults.tsv").splitlines()
    return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_every_fault_has_tests_that_are_there() -> None:
    there = set[str]()
    for path in ROOT.glob("tests/**/test_*.py"):
        there.update(re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.M))

    assert len(faults()) > 300
    assert [row["fault"] for row in faults() if not row["tests"].split()] == []
    assert [name for row in faults() for name in row["tests"].split() if name not in there] == []


def test_the_messages_of_the_troubleshooting_page_are_those_of_tested_faults() -> None:
    results = "\n".join(row["result"] for row in faults())
    messages = source("docs/troubleshoot.md").partition("## Common")[2].partition("## A run")[0]
    rows: list[str] = re.findall(r"^\| `([^|]+)` \|", messages, re.M)
    fragments = [
        part.strip() for row in rows for text in row.split("`") for part in text.split("…")
    ]

    assert len(rows) > 25
    assert [text for text in fragments if text not in results] == []
