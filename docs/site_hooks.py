"""What mkdocs does beyond mkdocs.yml: pages that lie outside docs/, and links that lead out of it.

All documents link to each other by relative paths, which work where the repository is browsed. On
the site, README.md, CONTRIBUTING.md and CHANGELOG.md are pages. A link to any other file outside
docs/, such as a module, becomes its text, because the site does not have the file. The page of all
faults is made from tests/faults.tsv, which has the tests that prove each of them.
"""

from __future__ import annotations

import csv
import re
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[1]
_DOCS = _ROOT / "docs"
_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/faults.tsv": "faults.md",
}
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside docs/."""
    for source, page in _PAGES.items():
        text = (_ROOT / source).read_text()
        content = _fault_tables(text) if source.endswith(".tsv") else text
        files.append(File.generated(config, page, content=content))
    return files


def _fault_tables(text: str) -> str:
    """The rows of tests/faults.tsv as a table for each area."""
    parts = ["# All faults\n"]
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    for area, faults in groupby(rows, lambda row: row["area"]):
        parts.append(f"\n## {area}\n\n| fault | result | tests |\n|---|---|---|\n")
        for row in faults:
            tests = ", ".join(f"`{test}`" for test in row["tests"].split())
            cells = (row["fault"], row["result"], tests)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links to and from files outside docs/."""
    outside = page.file.src_uri in _PAGES.values()
    folder = _ROOT if outside else (_DOCS / page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        target = (folder / path).resolve()
        if not target.exists():
            return match[0]  # mkdocs reports it
        if target.is_relative_to(_DOCS):
            return f"[{text}]({target.relative_to(_DOCS)}{anchor})" if outside else match[0]
        page_name = _PAGES.get(str(target.relative_to(_ROOT)))
        return f"[{text}]({page_name}{anchor})" if page_name else text

    return _LINK.sub(link, markdown)
