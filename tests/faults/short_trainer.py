"""`torchrun -m short_trainer CONFIG ...`: a training whose rank 1 finds a GPU that is too full.

It lacks room from the end of the step before SHORT_AT, counted from 1, as when another program has
taken memory. With SHORT_KEEPS, the memory plan keeps logits. Each rank prints when it releases its
cache, and when it measures a step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Self

from umbra.trainer import policy_engines, run_parts
from umbra.trainer.command_line import main, run_program


class ShortRoom(policy_engines.TrainingRoom):
    num_steps = 0

    def measure(self) -> None:
        super().measure()
        self.num_steps += 1
        print(f"rank {os.environ['RANK']} measures a step", flush=True)

    def lack(self) -> str:
        is_short = os.environ["RANK"] == "1" and self.num_steps == int(os.environ["SHORT_AT"]) - 1
        return "cuda:1 has room for 1.0 GiB" if is_short else super().lack()


class KeepingPlan(run_parts.JobPlan):
    @classmethod
    def make(cls, *args: Any, **kwargs: Any) -> Self:
        plan = super().make(*args, **kwargs)
        return replace(plan, memory=replace(plan.memory, logits_nbytes=1))


class TracedOffload(policy_engines.HostOffload):
    def release_cache(self) -> None:
        print(f"rank {os.environ['RANK']} releases its cache", flush=True)
        super().release_cache()


if __name__ == "__main__":
    run_parts.HostOffload = TracedOffload
    policy_engines.__dict__["TrainingRoom"] = ShortRoom
    if "SHORT_KEEPS" in os.environ:
        run_parts.JobPlan = KeepingPlan
    run_program(main)
