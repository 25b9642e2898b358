"""The site builds without warnings: all pages are in nav, no link is dead, nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir"]

    built = subprocess.run(
        [*command, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page.name: page.read_text() for page in tmp_path.glob("*.html")}
    assert {"index.html", "contributing.html", "faults.html"} <= set(pages)
    loaded = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?(https?:[^" >]*)')
    assert {name: found for name, text in pages.items() if (found := loaded.findall(text))} == {}
