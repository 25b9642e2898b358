"""`torchrun -m recorded_trainer CONFIG ...`: a training whose ranks record what they train on.

Each rank of each incarnation of a job appends lines to RECORDED_IN/INCARNATION-RANK.jsonl, where
RECORDED_INCARNATION is the first one:

    {"began": step}                          rank 0: the checkpoint it resumes from, 0 for none
    {"step": s, "world_size": n, "samples": [...]}   the batch that it trains on as step s

Lines of later steps than the checkpoint that the next incarnation resumes from are not part of the
history; see `trained_history`.

With HELD_IN, ranks can be held in a checkpoint at each of `SAVE_PLACES` (see `held_places`): its
tensors are copied, a rank's file is written, all are, it is complete, and it is announced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from held_places import wait_for_release

from umbra.runtime.session import rollouts
from umbra.runtime.session.session import Session
from umbra.trainer import policy_engines
from umbra.trainer.checkpoint import checkpoint_store
from umbra.trainer.command_line import main, run_program

SAVE_PLACES = ("copied", "written", "all written", "complete", "announced")


class RecordedRollouts(rollouts.Rollouts):
    """Records the rank's batches; owns its file for as long as the process lives."""

    def __init__(self, session: Session, manager: str, timeout_s: float = 60.0) -> None:
        super().__init__(session, manager, timeout_s)
        number = int(os.environ["RECORDED_INCARNATION"]) + session.incarnation - 1
        self._path = Path(os.environ["RECORDED_IN"]) / f"{number:03}-{session.rank}.jsonl"

    def begin(self, step: int, version: int, position: str, timeout_s: float) -> Mapping[str, int]:
        kept = super().begin(step, version, position, timeout_s)
        self._write({"began": step})
        return kept

    def next_batch(
        self, step: int, version: int, serve_sync: rollouts.ServeSync, timeout_s: float
    ) -> Mapping[str, Any]:
        columns = super().next_batch(step, version, serve_sync, timeout_s)
        # Samples in no micro-batch are not trained on, and those in two are trained on twice.
        micro_batches = [one for each in columns["mini_batches"] for one in each[0]]
        members = [idx for part in micro_batches for idx in part]
        samples = [_sample(columns, idx) for idx in members]
        world_size = int(os.environ["WORLD_SIZE"])
        self._write({"step": step, "world_size": world_size, "samples": samples})
        return columns

    def checkpointed(self, step: int, version: int, kept: Sequence[int]) -> None:
        super().checkpointed(step, version, kept)
        if "HELD_IN" in os.environ:
            wait_for_release("announced")

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _sample(columns: Mapping[str, Any], idx: int) -> dict[str, Any]:
    start, stop = (int(offset) for offset in columns["offsets"][idx : idx + 2])
    middle = start + int(columns["prompt_lens"][idx])
    return {
        "sample_id": columns["sample_ids"][idx],
        "prompt": columns["tokens"][start:middle].tolist(),
        "tokens": columns["tokens"][middle:stop].tolist(),
        "logprobs": columns["logprobs"][middle:stop].tolist(),
        "versions": columns["versions"][middle:stop].tolist(),
        "reward": float(columns["rewards"][idx]),
    }


def hold_saves() -> None:
    """Lets ranks be held in checkpoints."""

    def held(owner: Any, name: str, before: str = "", after: str = "") -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                wait_for_release(before)
            result = function(*args, **kwargs)
            if after:
                wait_for_release(after)
            return result

        setattr(owner, name, call)

    held(checkpoint_store.HostCopy, "take", after="copied")
    held(checkpoint_store.FileSystemWriter, "write_data", after="written")
    held(checkpoint_store, "complete", before="all written", after="complete")


if __name__ == "__main__":
    if "HELD_IN" in os.environ:
        hold_saves()
    policy_engines.__dict__["Rollouts"] = RecordedRollouts
    run_program(main)
