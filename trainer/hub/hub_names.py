"""Names of models and data sets on the Hugging Face hub, where a config may have a path.

Qwen/Qwen3-0.6B            the newest commit          openai/gsm8k/main          a configuration
Qwen/Qwen3-0.6B@v1.0       a branch, tag or commit    openai/gsm8k/main:test     and a split
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umbra.trainer.data.data_rows import SUFFIXES

_REPO: Final = r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w.-]+))?"
_MODEL: Final = re.compile(_REPO)
_DATA: Final = re.compile(_REPO + r"(/(?P<subset>[\w.-]+))?(:(?P<split>[\w\[\]:%+-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A name on the hub.

    Attributes:
        subset: of a data set, which the hub calls a configuration; "" is its only one.
        split: of a data set.
    """

    repo: str
    revision: str | None
    subset: str = ""
    split: str = ""


def model_name(path: Path) -> HubName | None:
    """The name that stands for a model's folder; None if `path` exists or is no name."""
    found = _MODEL.fullmatch(str(path))
    if found is None or path.exists():
        return None
    return HubName(repo=found["repo"], revision=found["revision"])


def data_name(path: Path, default_split: str) -> HubName | None:
    """The name that stands for a file of prompts; None if `path` exists or is no name."""
    found = _DATA.fullmatch(str(path))
    if found is None or path.suffix in SUFFIXES or path.exists():
        return None
    return HubName(
        repo=found["repo"],
        revision=found["revision"],
        subset=found["subset"] or "",
        split=found["split"] or default_split,
    )
