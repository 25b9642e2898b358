"""The draw for a token depends on seed and position, and on nothing else."""

from __future__ import annotations

import numpy as np

from umbra.engines.embedded.sampler import uniforms


def draw(seeds: list[int], positions: list[int]) -> list[float]:
    return uniforms(np.array(seeds, np.uint64), np.array(positions, np.int64)).tolist()


def test_a_draw_is_the_same_whatever_the_batch() -> None:
    together = draw([1, 2, 3, (1 << 63) - 1], [0, 5, 7, 1 << 30])

    alone = [draw([1], [0]), draw([2], [5]), draw([3], [7]), draw([(1 << 63) - 1], [1 << 30])]

    assert together == [one for (one,) in alone]


def test_draws_are_stable_across_releases() -> None:
    assert draw([0, 1, 12345], [0, 0, 678]) == [
        0.6524484863740322,
        0.3681895156516696,
        0.8468128010864125,
    ]


def test_draws_are_uniform_and_independent_along_both_axes() -> None:
    seeds, positions = np.meshgrid(np.arange(400, dtype=np.uint64), np.arange(400))

    grid = uniforms(seeds, positions)

    assert grid.min() > 0
    assert grid.max() < 1
    histogram = np.histogram(grid, bins=64, range=(0, 1))[0]
    expected = grid.size / 64
    chi_squared = float(((histogram - expected) ** 2 / expected).sum())
    assert chi_squared < 63 + 5 * (2 * 63) ** 0.5
    for axis in (0, 1):
        first, second = (np.delete(grid, drop, axis=axis).ravel() for drop in (-1, 0))
        correlation = np.corrcoef(first, second)[0, 1]
        assert abs(correlation) < 5 / grid.size**0.5
