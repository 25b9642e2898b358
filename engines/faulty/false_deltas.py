from __future__ import annotations

import numpy as np
import numpy.typing as npt

from umbra.runtime.engine_api.delta_buffer import DeltaColumns, Int32Array


def without_run(batch: DeltaColumns, run: int) -> DeltaColumns:
    """The batch without one run. All finishes stay, including the run's own request's."""
    counts = np.diff(batch["offsets"])  # [S]
    counts[run] = 0
    return _shortened(batch, counts, np.arange(len(counts)) != run)


def first_halves(batch: DeltaColumns) -> DeltaColumns:
    """The first half of every run, no finish: the whole batch then begins at earlier offsets."""
    counts = (np.diff(batch["offsets"]) + 1) // 2  # [S]
    halves = _shortened(batch, counts, np.ones(len(counts), np.bool_))
    halves["finished_ids"] = np.zeros(0, np.int64)
    halves["finish_reasons"] = []
    return halves


def _shortened(
    batch: DeltaColumns, counts: Int32Array, keeps: npt.NDArray[np.bool_]
) -> DeltaColumns:
    """The first `counts` [S] tokens of the S runs in `keeps` [S]; the others' counts are 0."""
    lengths = np.diff(batch["offsets"])
    within_run = np.arange(len(batch["tokens"])) - np.repeat(batch["offsets"][:-1], lengths)  # [N]
    has_token = within_run < np.repeat(counts, lengths)  # [N]
    offsets = np.zeros(int(keeps.sum()) + 1, np.int32)
    np.cumsum(counts[keeps], out=offsets[1:])
    return DeltaColumns(
        ids=batch["ids"][keeps],
        positions=batch["positions"][keeps],
        offsets=offsets,
        tokens=batch["tokens"][has_token],
        logprobs=batch["logprobs"][has_token],
        versions=batch["versions"][keeps],
        finished_ids=batch["finished_ids"],
        finish_reasons=batch["finish_reasons"],
    )
