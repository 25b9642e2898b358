"""Terminal output in docs/ is that of `make captures`, which runs too long for a test."""

from __future__ import annotations

import re
from pathlib import Path

from documented_examples import captures_of

ROOT = Path(__file__).resolve().parents[3]


def test_pages_show_what_the_script_captures() -> None:
    script = (ROOT / "tests" / "captures" / "captures.py").read_text()
    made = set(re.findall(r'"([\w-]+)": shown\(', script))
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    captures = [captures_of(page.name) for page in pages]

    assert {name for shown in captures for name in shown} == made
    assert [name for shown in captures for name, text in shown.items() if not text] == []
