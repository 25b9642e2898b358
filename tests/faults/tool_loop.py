"""An agent loop that asks a tool between two generations, and its reward."""

from __future__ import annotations

from typing import Any

from umbra.runtime.rollout.agents.agent_loop import AgentContext


async def run(ctx: AgentContext, sample: dict[str, Any]) -> None:
    async def ask() -> str:
        return f"tool {sample['answer']}"

    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=3)
    tokens += ctx.encode(await ctx.once("tool", ask))
    await ctx.generate(tokens, max_new_tokens=3)


def by_answer(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    return [float(number) for number in answer]
