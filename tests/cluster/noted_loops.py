"""An agent loop and a reward that note in which process they ran.

The samples are those of a run without a loop and with the reward `plain_rewards.distinct`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from plain_rewards import distinct

from umbra.runtime.rollout.agents.agent_loop import AgentContext

_GROUP_S = 0.02  # so that the rewards of several groups run at the same time


async def run(ctx: AgentContext, sample: dict[str, Any]) -> None:
    await ctx.generate(ctx.prompt_tokens)
    _note("loop")


def score(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    time.sleep(_GROUP_S)
    _note("reward")
    return distinct(prompts, completions)


def processes_of(kind: str, folder: Path) -> set[int]:
    """Process ids of all that ran a "loop" or a "reward"."""
    rows = [row.split() for row in (folder / "noted").read_text().splitlines()]
    return {int(pid) for noted, pid in rows if noted == kind}


def _note(kind: str) -> None:
    with (Path(os.environ["NOTED_IN"]) / "noted").open("a") as noted:
        noted.write(f"{kind} {os.getpid()}\n")
