"""Messages of engines are checked before they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import ProtocolError

ITEM: dict[str, Any] = {
    "ids": np.asarray([1], np.int64),
    "positions": np.zeros(1, np.int32),
    "offsets": np.asarray([0, 2], np.int32),
    "tokens": np.zeros(2, np.int32),
    "logprobs": np.zeros(2, np.float32),
    "versions": np.zeros(1, np.int64),
    "finished_ids": np.zeros(0, np.int64),
    "finish_reasons": [],
}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("ids", None, "ids is missing"),
        ("tokens", np.zeros(2, np.int64), "tokens must be 1-d int32"),
        ("positions", np.zeros(2, np.int32), "positions: 2 values, not 1"),
        ("offsets", np.asarray([0, 3], np.int32), "do not cut 2 tokens"),
        ("offsets", np.asarray([0], np.int32), "offsets: 1 values, not 2"),
        ("versions", np.asarray([-1], np.int64), "negative version"),
        ("logprobs", np.asarray([np.nan, 0], np.float32), "not finite"),
        ("finish_reasons", ["stop"], "finished_ids: 0 values, not 1"),
        ("finish_reasons", [7], "must be a list of texts"),
    ],
)
def test_a_malformed_batch_is_refused(column: str, value: object, message: str) -> None:
    DeltaBatch.from_wire(ITEM)

    with pytest.raises(ProtocolError, match=message):
        DeltaBatch.from_wire({**ITEM, column: value})


def test_offsets_whose_differences_overflow_are_refused() -> None:
    batch = ITEM | {
        "ids": np.arange(3),
        "positions": np.zeros(3, np.int32),
        "versions": np.zeros(3, np.int64),
        "offsets": np.asarray([0, 2**31 - 1, -2, 2], np.int32),
    }

    with pytest.raises(ProtocolError, match="do not cut 2 tokens"):
        DeltaBatch.from_wire(batch)


@pytest.mark.parametrize("item", [None, [], "text", np.zeros(3)])
def test_a_batch_that_is_no_map_is_refused(item: object) -> None:
    with pytest.raises(ProtocolError, match="must be a map"):
        DeltaBatch.from_wire(item)
