"""Texts in errors about values that other processes sent."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from umbra.runtime.errors import brief


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("word", "'word'"),
        (b"\xff", "b'\\xff'"),
        (None, "None"),
        (2.5, "2.5"),
        ([1, "a", (2, 3)], "[1, 'a', (2, 3)]"),
        ({"a": {"b": []}}, "{'a': {'b': []}}"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, ...]"),
        ([[[["deep"]]]], "[[[...]]]"),
        (np.zeros(3), "array([0., 0., 0.])"),
    ],
)
def test_a_small_value_is_shown(value: object, text: str) -> None:
    assert brief(value) == text


def test_a_large_or_deep_value_is_cut_at_once() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    large: list[object] = [deep, "x" * (1 << 24), bytes(1 << 24), ["text"] * (1 << 20)]
    before = time.process_time()

    texts = [brief(value) for value in (*large, large, dict(enumerate(large)))]

    assert max(map(len, texts)) <= 200
    assert time.process_time() - before < 0.1
