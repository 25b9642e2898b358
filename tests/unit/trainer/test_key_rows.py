"""Keys laid out for a varlen kernel: the gathered rows, and the gradient of shared rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from umbra.trainer.model.packing import KeyRows

CPU = torch.device("cpu")


def layout(
    prompt_lens: list[int], completions: list[tuple[int, int]]
) -> tuple[NDArray[np.int64], int, int]:
    """Packed rows of the keys, number of prompt rows and of all; completions: (prompt, length)."""
    starts = np.r_[0, np.cumsum(prompt_lens)]
    sequences: list[NDArray[np.int64]] = [
        np.arange(starts[i], starts[i + 1]) for i in range(len(prompt_lens))
    ]
    row = num_prompt_rows = int(starts[-1])
    for prompt, length in completions:
        sequences.append(np.r_[sequences[prompt], np.arange(row, row + length)])
        row += length
    return np.concatenate(sequences), num_prompt_rows, row


LAYOUTS: dict[str, tuple[list[int], list[tuple[int, int]]]] = {
    "one prompt alone": ([3], []),
    "a group": ([4], [(0, 5), (0, 2), (0, 1)]),
    "groups of several sizes": ([2, 5, 1], [(1, 3), (0, 3), (1, 2), (1, 1), (2, 4)]),
}


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_gradient_is_that_of_index_select(name: str) -> None:
    rows, num_prompt_rows, num_rows = layout(*LAYOUTS[name])
    values = torch.randn(num_rows, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(rows), 6, dtype=torch.float64)
    expected = values.index_select(0, torch.as_tensor(rows))
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), values)

    keys = KeyRows.invert(rows, num_prompt_rows, num_rows, CPU).gather(values)

    (gradient,) = torch.autograd.grad((keys * weights).sum(), values)
    assert torch.equal(keys, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_unused_indices_add_nothing_even_if_gradients_are_not_finite() -> None:
    rows, num_prompt_rows, num_rows = layout([1, 2], [(0, 1), (0, 1)])
    values = torch.zeros(num_rows, 1, requires_grad=True)
    keys = KeyRows.invert(rows, num_prompt_rows, num_rows, CPU)
    of_keys = torch.ones(len(rows), 1)
    of_keys[0] = torch.inf  # the first prompt's own use of its row

    (gradient,) = torch.autograd.grad(keys.gather(values), values, of_keys)

    assert torch.equal(gradient.flatten(), torch.tensor([torch.inf, 1.0, 1.0, 1.0, 1.0]))
