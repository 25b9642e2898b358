"""The columnar batch of tokens that an engine streams once per tick.

S: runs, N: tokens in them, F: finished requests. An example of two runs and one finish:

    ids [7, 9]  positions [0, 4]  offsets [0, 2, 5]  versions [3, 3]
    tokens [11, 12, 21, 22, 23]  logprobs [...]  finished_ids [9]  finish_reasons ["stop"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import ProtocolError, brief

_DTYPES: Final = {
    "ids": np.int64,
    "positions": np.int32,
    "offsets": np.int32,
    "tokens": np.int32,
    "logprobs": np.float32,
    "versions": np.int64,
    "finished_ids": np.int64,
}


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """One checked batch.

    Attributes:
        ids, positions, versions: [S] request id, completion offset of the first token, version.
        bounds: [S + 1] offsets into tokens.
        tokens, logprobs: [N] int32, [N] float32.
        finishes: (request id, reason) of the F finished requests.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    bounds: NDArray[np.int64]
    versions: NDArray[np.int64]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finishes: list[tuple[int, str]]

    @classmethod
    def from_wire(cls, item: object) -> DeltaBatch:
        """Raises ProtocolError for columns that do not fit together."""
        if not isinstance(item, Mapping):
            raise ProtocolError(f"a delta batch must be a map, got {brief(item)}")
        fields = cast("Mapping[str, Any]", item)
        columns: dict[str, NDArray[Any]] = {}
        for name, dtype in _DTYPES.items():
            column = fields.get(name)
            if not isinstance(column, np.ndarray):
                raise ProtocolError(f"delta column {name} is missing or not an array")
            array = cast(NDArray[Any], column)
            if array.dtype != dtype or array.ndim != 1:
                raise ProtocolError(f"delta column {name} must be 1-d {np.dtype(dtype)}")
            columns[name] = array
        reasons: list[Any] | None = fields.get("finish_reasons")
        if not isinstance(reasons, list) or not all(isinstance(text, str) for text in reasons):
            raise ProtocolError("delta column finish_reasons must be a list of texts")
        _check_lengths(columns, len(reasons))
        return cls(
            ids=columns["ids"],
            positions=columns["positions"].astype(np.int64),
            bounds=columns["offsets"].astype(np.int64),
            versions=columns["versions"],
            tokens=columns["tokens"],
            logprobs=columns["logprobs"],
            finishes=list(zip(columns["finished_ids"].tolist(), reasons, strict=True)),
        )

    def select(self, mask: NDArray[np.bool_]) -> DeltaBatch:
        """The runs of `mask` [S], without any finishes."""
        counts = np.diff(self.bounds)
        bounds = np.zeros(int(np.count_nonzero(mask)) + 1, np.int64)
        np.cumsum(counts[mask], out=bounds[1:])
        tokens = np.repeat(mask, counts)
        return DeltaBatch(
            ids=self.ids[mask],
            positions=self.positions[mask],
            bounds=bounds,
            versions=self.versions[mask],
            tokens=self.tokens[tokens],
            logprobs=self.logprobs[tokens],
            finishes=[],
        )


def _check_lengths(columns: dict[str, NDArray[Any]], num_reasons: int) -> None:
    num_runs, num_tokens = len(columns["ids"]), len(columns["tokens"])
    lengths = {
        "positions": num_runs,
        "versions": num_runs,
        "offsets": num_runs + 1,
        "logprobs": num_tokens,
        "finished_ids": num_reasons,
    }
    for name, length in lengths.items():
        if len(columns[name]) != length:
            raise ProtocolError(f"delta column {name}: {len(columns[name])} values, not {length}")
    offsets = columns["offsets"].astype(np.int64)  # differences of 32-bit integers may overflow
    if offsets[0] != 0 or offsets[-1] != num_tokens or bool((np.diff(offsets) < 0).any()):
        raise ProtocolError(
            f"delta offsets {brief(offsets.tolist())} do not cut {num_tokens} tokens"
        )
    if bool((columns["versions"] < 0).any()):
        raise ProtocolError("a delta of tokens with a negative version")
    if not bool(np.isfinite(columns["logprobs"]).all()):
        raise ProtocolError("a delta with logprobs that are not finite")
