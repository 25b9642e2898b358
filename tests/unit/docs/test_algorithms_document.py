"""docs/algorithms.md has every loss and estimator; the example of add-an-algorithm.md works."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from documented_examples import files_of

from umbra.trainer.algorithms.base import LossInputs, load_advantage_estimator, load_loss
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES
from umbra.trainer.config.trainer_config import TrainSection

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"


@pytest.mark.parametrize("name", [*LOSSES, *ADVANTAGE_ESTIMATORS])
def test_every_algorithm_has_a_row(name: str) -> None:
    assert f'\n| `"{name}"` | ' in DOCUMENT.read_text()


def test_the_example_computes_a_loss_and_advantages(tmp_path: Path) -> None:
    for name, text in files_of("add-an-algorithm.md").items():
        (tmp_path / name).write_text(text)

    loss = load_loss("my_losses:truncated_reinforce", [str(tmp_path)])
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    inputs = LossInputs(
        rollout_logprobs=torch.tensor([-1.0, -2.0, -5.0]),
        proximal_logprobs=logprobs.detach(),
        advantages=torch.tensor([1.0, 1.0, -0.5]),
        weights=torch.full((3,), 0.25),
        sample_lens=torch.tensor([2, 1]),
    )
    output = loss(logprobs, inputs, TrainSection(steps=1))
    output.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, -0.25, 0.25]  # the last ratio is cut to 2
    assert output.metrics.keys() == {"ratio"}
    centred = load_advantage_estimator("my_losses:centred", [str(tmp_path)])
    assert centred(np.array([0.0, 1.0], np.float32)).tolist() == [-0.5, 0.5]
