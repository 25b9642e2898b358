"""SmolLM2-135M-Instruct and arithmetic problems for it: what `make smollm2` makes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Final

import pytest

RECIPE: Final = Path(__file__).parents[2] / "launch/recipes/arithmetic"


def smollm2_folder() -> Path:
    """Has `model`, and data sets of the tasks in folders of their own; may not be there."""
    folder: Path = runpy.run_path(str(RECIPE / "arithmetic_assets.py"))["assets_folder"]()
    return folder


needs_smollm2 = pytest.mark.skipif(
    not smollm2_folder().exists(), reason="`make smollm2` makes the model, which is not there"
)
