"""docs/architecture.md lists the folders that there are, and names classes that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[3]
TEXT: Final = (ROOT / "docs" / "architecture.md").read_text()
TOP: Final = ("runtime", "engines", "trainer")


def modules() -> list[Path]:
    return [path for top in TOP for path in (ROOT / top).rglob("*.py")]


def test_the_table_has_every_folder() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \| [^|]+ \|$", TEXT, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}

    folders = {
        str(path.parent.relative_to(ROOT)) for path in modules() if path.name != "__init__.py"
    }

    assert listed == folders


def test_named_classes_and_folders_exist() -> None:
    classes = {
        node.name
        for path in modules()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }

    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)*)[`.(]", TEXT)) - {"TaskGroup"}
    paths = set(re.findall(rf"`((?:{'|'.join(TOP)}|tests)/[\w/.]*)`", TEXT))

    assert len(named) > 20
    assert named - classes == set()
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
