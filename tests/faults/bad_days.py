"""An agent loop and a reward that fail for a few prompts, for each in a different way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from umbra.runtime.rollout.agents.agent_loop import AgentContext

HANGS, RAISES, REWARD_RAISES, DIES_ONCE, BLOCKS = "3", "7", "11", "15", "19"  # prompts' answers


async def run(ctx: AgentContext, sample: dict[str, Any]) -> None:
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=4)
    match sample["answer"]:
        case "3":
            await asyncio.sleep(3600.0)
        case "7":
            raise LookupError("the tool is gone")
        case "15":
            die_once(Path("died"))
        case "19":
            time.sleep(3600.0)  # noqa: ASYNC251  a tool that is not asynchronous
        case _:
            pass
    await ctx.generate(tokens)


def die_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    if REWARD_RAISES in answer:
        raise ZeroDivisionError("no digits to divide by")
    return [float(len(text)) for text in completions]
