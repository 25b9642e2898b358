"""The pages: the site builds without warnings, and each says what the code says."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from documented_examples import captures_of, files_of

from umbra.runtime.settings import annotations_of
from umbra.runtime.testing.scripted_agents import ScriptedContext
from umbra.trainer.algorithms.base import load_advantage_estimator, load_loss
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES
from umbra.trainer.config.config_file import other_trainers_hint
from umbra.trainer.config.trainer_config import TrainerConfig, TrainSection

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


def test_pages_show_what_the_script_captures() -> None:
    script = (ROOT / "tests" / "captures" / "captures.py").read_text()
    made = set(re.findall(r'"([\w-]+)": shown\(', script))
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    captures = [captures_of(page.name) for page in pages]

    assert {name for shown in captures for name in shown} == made
    assert [name for shown in captures for name, text in shown.items() if not text] == []


def test_the_judge_grades_each_completion(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}
    exec(files_of("engines.md")["graded.py"], shown)
    context = ScriptedContext({"prompt": "2 + 2"}, answers=[], pools={"judge": ["7", "none"]})

    rewards = asyncio.run(shown["graded"](["2 + 2", "2 + 2"], ["4", "5"], context))

    assert rewards == [7.0, 0.0]


ROW: Final = re.compile(r"^\| (?P<theirs>[^|]*`[^|]*) \| (?P<ours>[^|]*) \|", re.MULTILINE)
SETTINGS: Final = {
    f"{name}.{field.name}"
    for name, section in annotations_of(TrainerConfig).items()
    if dataclasses.is_dataclass(section)
    for field in dataclasses.fields(section)
}


def rows() -> list[tuple[str, str]]:
    return [
        (row["theirs"], row["ours"])
        for row in ROW.finditer((ROOT / "docs" / "coming-from.md").read_text())
    ]


def test_the_second_column_has_settings_of_umbra() -> None:
    named = {name for _, ours in rows() for name in re.findall(r"`([a-z]+\.[a-z_]+)", ours)}

    assert len(named) > 40
    assert named <= SETTINGS


def test_the_tables_say_what_the_errors_say() -> None:
    for theirs, ours in rows():
        for text in re.findall(r"`([^`]+)`", theirs):
            hint = other_trainers_hint(re.split("=", text)[0].split("."), 1)
            answers = re.findall(r"'([a-z]+(?:\.[a-z_]+)+)'", hint)
            found = [answer for answer in answers if answer in ours]
            assert found or not hint, f"{hint}, but the document has {ours}"


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


@pytest.mark.parametrize("name", [*LOSSES, *ADVANTAGE_ESTIMATORS])
def test_every_algorithm_has_a_row(name: str) -> None:
    is_there = f'\n| `"{name}"` | ' in (ROOT / "docs" / "algorithms.md").read_text()
    assert is_there, f"add a row for {name!r} to docs/algorithms.md"


@pytest.mark.parametrize(
    ("setting", "names"), [("loss", LOSSES), ("advantage", ADVANTAGE_ESTIMATORS)]
)
def test_a_setting_s_description_names_every_algorithm(
    setting: str, names: Mapping[str, str]
) -> None:
    (text,) = re.findall(rf"\n +{setting}: ((?:.+\n)+?)(?= +\w+: )", TrainSection.__doc__ or "")
    assert set(re.findall(r'"(\w+)"', text)) == set(names), f"name all in `{setting}`: TrainSection"


def test_the_example_of_a_loss_and_an_advantage_is_right(tmp_path: Path) -> None:
    for name, text in files_of("add-an-algorithm.md").items():
        (tmp_path / name).write_text(text)

    load_loss("my_losses:truncated_reinforce", [str(tmp_path)])
    centred = load_advantage_estimator("my_losses:centred", [str(tmp_path)])
    runpy.run_path(str(tmp_path / "test_my_losses.py"))["test_a_ratio_is_cut_to_two"]()

    assert centred(np.array([0.0, 1.0], np.float32)).tolist() == [-0.5, 0.5]
