"""docs/architecture.md lists every module with the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"


def module_rows() -> list[str]:
    """One row of the module map per module that does something, sorted by path."""
    rows: list[str] = []
    for folder in ("runtime", "engines", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name in ("__init__.py", "__main__.py"):
                continue
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            paragraph = " ".join(docstring.split("\n\n")[0].split())
            rows.append(f"| `{path.relative_to(ROOT)}` | {paragraph} |")
    return rows


def test_every_module_is_in_the_map_with_its_own_words() -> None:
    text = DOCUMENT.read_text()

    missing = [row for row in module_rows() if row not in text]

    assert not missing, "rows to put into docs/architecture.md:\n" + "\n".join(missing)


def test_the_map_lists_no_module_that_is_gone() -> None:
    rows = set(module_rows())

    stale = [
        line
        for line in DOCUMENT.read_text().splitlines()
        if line.startswith("| `") and ".py`" in line and line not in rows
    ]

    assert not stale, "rows to take out of docs/architecture.md:\n" + "\n".join(stale)


if __name__ == "__main__":  # prints the map, to be pasted
    print("| module | what it is |\n|---|---|")
    print("\n".join(module_rows()))
