"""Files and commands that a document shows as examples.

`make captures` writes the blocks between these marks, each of which shows a command and its output:

    <!-- capture NAME -->
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_FILE = re.compile(r"^```\w+\n(# (\S+)\n.*?)^```$", re.MULTILINE | re.DOTALL)
_CAPTURE = re.compile(r"<!-- capture (\S+) -->\n```\n(.*?)```\n<!-- end -->", re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def path_of(document: str) -> Path:
    """README.md, or a page of docs/."""
    return _ROOT / document if document == "README.md" else _ROOT / "docs" / document


def files_of(document: str) -> dict[str, str]:
    """The blocks whose first line is a comment with a file's name, by that name."""
    text = path_of(document).read_text()
    return {block[2]: block[1] for block in _FILE.finditer(text)}


def sessions_of(document: str) -> list[tuple[str, list[str]]]:
    """The script and the lines of output of each console block."""
    blocks = [block[1].splitlines() for block in _CONSOLE.finditer(path_of(document).read_text())]
    return [
        (
            "\n".join(line.removeprefix("$ ") for line in block if line.startswith("$ ")),
            [line for line in block if not line.startswith("$ ")],
        )
        for block in blocks
    ]


def captures_of(document: str) -> dict[str, str]:
    """The text of each capture, by name."""
    return {block[1]: block[2] for block in _CAPTURE.finditer(path_of(document).read_text())}


def write_captures(document: str, texts: Mapping[str, str]) -> None:
    """Replaces the text of each capture that `texts` has."""

    def block(found: re.Match[str]) -> str:
        text = texts.get(found[1], found[2])
        return f"<!-- capture {found[1]} -->\n```\n{text}```\n<!-- end -->"

    path = path_of(document)
    path.write_text(_CAPTURE.sub(block, path.read_text()))
