"""`torchrun -m compiling_trainer CONFIG train.compile=true ...`: a training that compiles in
seconds, because torch traces its passes and makes no code of them.

Each rank prints how many graphs torch has traced before each step, and in it. UNWARMED steps are
the first to trace one. A compiler that is HELD waits, once it has left a file `compiling`. Code
that is SHORT lacks memory on rank 1 the first time that it runs in a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from umbra.trainer import learning, policy_engines, run_parts
from umbra.trainer.command_line import main, run_program
from umbra.trainer.data.train_batch import TrainBatch

library: Any = torch
counters: Any = library._dynamo.utils.counters


class CountedStep(run_parts.TrainStep):
    def run(self, batch: TrainBatch, step: int) -> dict[str, float]:
        before = counters["stats"]["unique_graphs"]
        metrics = super().run(batch, step)
        num_more = counters["stats"]["unique_graphs"] - before
        print(f"rank {os.environ['RANK']} step {step + 1}: {before} graphs, {num_more} more")
        return metrics


class UnwarmedEngines(policy_engines.PolicyEngines):
    def may_warm_up(self, step: int) -> bool:
        return False


def traced(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    if "HELD" in os.environ:
        Path("compiling").touch()
        while True:
            time.sleep(0.02)
    if "SHORT" in os.environ and os.environ["RANK"] == "1" and not Path("short").exists():
        return lacks_memory
    return graph.forward


def lacks_memory(*_: Any) -> None:
    Path("short").touch()
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


if __name__ == "__main__":
    library.compile = partial(library.compile, backend=traced)
    learning.TrainStep = CountedStep
    if "UNWARMED" in os.environ:
        run_parts.PolicyEngines = UnwarmedEngines
    run_program(main)
