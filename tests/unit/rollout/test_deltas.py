"""Messages of engines are checked before they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from umbra.runtime.engine_api.delta_batch import DeltaBatch
from umbra.runtime.errors import ProtocolError


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("ids", None, "ids is missing"),
        ("tokens", np.zeros(2, np.int64), "tokens must be 1-d int32"),
        ("positions", np.zeros(2, np.int32), "positions: 2 values, not 1"),
        ("offsets", np.asarray([0, 3], np.int32), "do not cut 2 tokens"),
        ("versions", np.asarray([-1], np.int64), "negative version"),
        ("logprobs", np.asarray([np.nan, 0], np.float32), "not finite"),
        ("finish_reasons", ["stop"], "finished_ids: 0 values, not 1"),
    ],
)
def test_a_malformed_batch_is_refused(column: str, value: object, message: str) -> None:
    item: dict[str, Any] = {
        "ids": np.asarray([1], np.int64),
        "positions": np.zeros(1, np.int32),
        "offsets": np.asarray([0, 2], np.int32),
        "tokens": np.zeros(2, np.int32),
        "logprobs": np.zeros(2, np.float32),
        "versions": np.zeros(1, np.int64),
        "finished_ids": np.zeros(0, np.int64),
        "finish_reasons": [],
    }
    DeltaBatch.from_wire(item)

    with pytest.raises(ProtocolError, match=message):
        DeltaBatch.from_wire({**item, column: value})
