"""Texts of the code that name a module of umbra name one that exists.

A program that is started by a module's name, a target "module:Class" and a pattern
that looks for a module's file in a stack fail late, or in silence, when the module moves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
FOLDERS = ("runtime", "engines", "trainer", "tests")
NAME = re.compile(r"\bumbra([./])((?:runtime|engines|trainer)(?:\1\w+)*)")


def named_modules() -> Iterator[tuple[str, str]]:
    """(where, path from the repository) of each module that a text names; docstrings included."""
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for separator, name in NAME.findall(node.value):
                        where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                        yield where, name.replace(separator, "/")


def exists(name: str) -> bool:
    """Whether it is a module, a folder, or a name in a module."""
    path = REPOSITORY / name
    return path.is_dir() or any(Path(f"{module}.py").is_file() for module in (path, path.parent))


def test_modules_that_texts_name_exist() -> None:
    named = list(named_modules())

    gone = [f"{where}: {name}" for where, name in named if not exists(name)]

    assert len(named) > 100
    assert not gone, "\n".join(gone)
