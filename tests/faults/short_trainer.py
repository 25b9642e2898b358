"""`torchrun -m short_trainer CONFIG ...`: a training whose rank 1 finds a GPU that is too full.

It lacks room before step SHORT_AT, counted from 1, as when another program has taken memory.
"""

from __future__ import annotations

import os

from umbra.trainer import policy_engines
from umbra.trainer.command_line import main, run_program


class ShortRoom(policy_engines.TrainingRoom):
    num_steps = 0

    def measure(self) -> None:
        super().measure()
        self.num_steps += 1

    def lack(self) -> str:
        is_short = os.environ["RANK"] == "1" and self.num_steps == int(os.environ["SHORT_AT"]) - 1
        return "cuda:1 has room for 1.0 GiB" if is_short else super().lack()


if __name__ == "__main__":
    policy_engines.__dict__["TrainingRoom"] = ShortRoom
    run_program(main)
