"""The tables of docs/coming-from.md name settings that exist, and agree with the errors."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Final

from umbra.runtime.settings import annotations_of
from umbra.trainer.config.other_trainers import other_trainers_hint
from umbra.trainer.config.trainer_config import TrainerConfig

DOCUMENT: Final = Path(__file__).resolve().parents[3] / "docs" / "coming-from.md"
ROW: Final = re.compile(r"^\| (?P<theirs>[^|]*`[^|]*) \| (?P<ours>[^|]*) \|", re.MULTILINE)
SETTINGS: Final = {
    f"{name}.{field.name}"
    for name, section in annotations_of(TrainerConfig).items()
    if dataclasses.is_dataclass(section)
    for field in dataclasses.fields(section)
}


def rows() -> list[tuple[str, str]]:
    return [(row["theirs"], row["ours"]) for row in ROW.finditer(DOCUMENT.read_text())]


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
