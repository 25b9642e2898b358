"""docs/algorithms.md has every loss and advantage estimator, and its example can be loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from documented_examples import files_of

from umbra.trainer.algorithms.algorithm_loading import load_advantage_estimator, load_loss
from umbra.trainer.algorithms.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"


@pytest.mark.parametrize("name", [*LOSSES, *ADVANTAGE_ESTIMATORS])
def test_every_algorithm_has_a_row(name: str) -> None:
    assert f'\n| `"{name}"` | ' in DOCUMENT.read_text()


def test_the_example_can_be_loaded(tmp_path: Path) -> None:
    for name, text in files_of("algorithms.md").items():
        (tmp_path / name).write_text(text)

    assert load_loss("my_losses:reinforce", [str(tmp_path)])
    centred = load_advantage_estimator("my_losses:centred", [str(tmp_path)])
    assert centred(np.array([0.0, 1.0], np.float32)).tolist() == [-0.5, 0.5]
