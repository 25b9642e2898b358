"""The tokens that top-k and top-p keep, in every dtype, with ties, and a few rows at a time."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import pytest
import torch

from umbra.runtime.engine_api import kept_tokens
from umbra.runtime.engine_api.kept_tokens import Truncation, lowest_kept

LOGITS = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125]]).log()
HEAT = torch.ones(2, 1)


@pytest.mark.parametrize(
    ("top_p", "top_k", "share"),
    [
        (0.48, 0, 0.5),
        (0.52, 0, 0.25),
        (0.73, 0, 0.25),
        (0.77, 0, 0.125),
        (1.0, 1, 0.5),
        (1.0, 2, 0.25),
        (1.0, 9, 0.125),
        (0.6, 2, 0.5),  # of the two that top-k keeps, the first has two thirds
        (0.7, 2, 0.25),
        (1e-9, 0, 0.5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_least_probable_kept_token(
    top_p: float, top_k: int, share: float, dtype: torch.dtype
) -> None:
    logits = LOGITS.to(dtype)

    lowest = lowest_kept(logits, HEAT, Truncation(top_p, top_k))

    assert lowest.tolist() == [[logits[0][[0.5, 0.25, 0.125].index(share)].item()]] * 2


def test_a_higher_temperature_keeps_more() -> None:
    heats = torch.tensor([[0.5], [2.0]])

    lowest = lowest_kept(LOGITS, heats, Truncation(0.7))

    assert lowest.exp().flatten().tolist() == pytest.approx([0.5, 0.125])


def test_rows_are_sorted_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, heats = torch.randn(9, 50), torch.rand(9, 1) + 0.5
    whole = lowest_kept(logits, heats, Truncation(0.8, 30))

    monkeypatch.setattr(kept_tokens, "MAX_SORTED_LOGITS", 120)

    assert torch.equal(lowest_kept(logits, heats, Truncation(0.8, 30)), whole)
