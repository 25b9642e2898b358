"""Agent loops as users write them, good and bad. Tokens are words `t<i>`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from umbra.runtime.rollout.agents.agent_loop import AgentContext


async def two_turns(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """Generates 5 tokens, reads the tool's 2, generates the rest; the reward function scores."""
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    tokens += ctx.encode("t7 t9")
    tokens += await ctx.generate(tokens)
    assert await ctx.generate(tokens) == []
    assert ctx.finish_reason == "length"
    return None


async def notes_its_process(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """Generates once, and appends its process id to a file at the end."""
    await ctx.generate(ctx.prompt_tokens)
    with (Path(sample["marker"]).parent / "processes").open("a") as processes:
        processes.write(f"{os.getpid()}\n")
    return None


def die_the_first_time(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


_paying: set[str] = set()  # payments of this process's loops without a receipt so far


async def pays_once(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """Pays, and writes down that it did; one of the loops kills the process in between turns.

    Not while another one pays: what has been done and is not kept yet would be done again.
    """
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    folder = Path(sample["marker"]).parent

    payment = f"{ctx.prompt} {tokens[-5:]}\n"

    def pay() -> dict[str, Any]:
        _paying.add(payment)
        with (folder / "payments").open("a") as payments:
            payments.write(payment)
        return {"amount": len(tokens)}

    receipt = await ctx.once("payment", pay)
    _paying.discard(payment)
    if not _paying:
        die_the_first_time(Path(sample["marker"]))
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    return float(receipt["amount"])


async def raises(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    await ctx.generate(ctx.prompt_tokens, max_new_tokens=3)
    raise LookupError("the tool is gone")


async def retokenises(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    await ctx.generate(ctx.prompt_tokens, max_new_tokens=3)
    await ctx.generate([63, 62, 61, 60, 59, 58, 57])
    return 0.0


async def kills_its_process_for_t3(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """Others take long enough to be there when it does."""
    tokens = await ctx.generate(ctx.prompt_tokens, max_new_tokens=5)
    if ctx.prompt == "t3":
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.1)
    return float(len(tokens))


_met: set[str] = set()
_all_have_met = asyncio.Event()


async def meets_7_others_twice(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """Its process is killed as soon as all have met; in the next one they meet again."""
    _met.add(ctx.prompt)
    if len(_met) == 8:
        die_the_first_time(Path(sample["marker"]))
        _all_have_met.set()
    async with asyncio.timeout(15.0):
        await _all_have_met.wait()
    return float(len(await ctx.generate(ctx.prompt_tokens, max_new_tokens=5)))


async def blocks_the_first_of_two_times(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """For t3, as a tool does that hangs now and then."""
    if ctx.prompt == "t3":
        tried = Path(sample["marker"]).with_name("tried-for-t3")
        num_tries = len(tried.read_text()) if tried.exists() else 0
        tried.write_text("." * (num_tries + 1))
        if num_tries % 2 == 0:
            time.sleep(60.0)  # noqa: ASYNC251
    return float(len(await ctx.generate(ctx.prompt_tokens, max_new_tokens=5)))


async def tool_that_blocks() -> None:
    time.sleep(60.0)  # noqa: ASYNC251


async def gathers_what_blocks_for_t3(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """The tool that blocks runs in a task of its own."""
    tokens = await ctx.generate(ctx.prompt_tokens, max_new_tokens=5)
    if ctx.prompt == "t3":
        await asyncio.gather(tool_that_blocks(), asyncio.sleep(0.0))
    return float(len(tokens))


async def stops_the_loop_for_t3(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    tokens = await ctx.generate(ctx.prompt_tokens, max_new_tokens=5)
    if ctx.prompt == "t3":
        asyncio.get_running_loop().stop()
    return float(len(tokens + await ctx.generate([*ctx.prompt_tokens, *tokens])))


async def cancels_all_tasks_for_t3(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """The others await a task of their own, which is cancelled, too."""
    tokens = await ctx.generate(ctx.prompt_tokens, max_new_tokens=5)
    if ctx.prompt == "t3":
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
    (more,) = await asyncio.gather(ctx.generate([*ctx.prompt_tokens, *tokens]))
    return float(len(tokens + more))


async def exits_in_a_task_for_t3(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    async def tool() -> None:
        if ctx.prompt == "t3":
            sys.exit("enough")

    tokens = await ctx.generate(ctx.prompt_tokens, max_new_tokens=5)
    await asyncio.gather(tool())
    return float(len(tokens + await ctx.generate([*ctx.prompt_tokens, *tokens])))


async def gives_no_token_for_t3(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """For the prompt t3 it gives a token that the model does not have."""
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    if ctx.prompt == "t3":
        await ctx.generate([*tokens, 64])  # of a vocabulary of 64
    return float(len(tokens))


async def renders_chats(ctx: AgentContext, sample: dict[str, Any]) -> float:
    """1 if the chats of the policy and of the judge are rendered with their own variables."""
    messages = [{"role": "user", "content": "t1"}]
    judge = ctx.pool("judge")
    answers = [
        await judge.chat(messages, 4, seed=3),
        await judge.generate(judge.encode("t7 t1"), 4, seed=3),
        await judge.chat(messages, 4, seed=3, chat_template_kwargs={"word": "t9"}),
        await judge.generate(judge.encode("t9 t1"), 4, seed=3),
    ]
    first, expected, other, expected_other = (answer.tokens for answer in answers)
    tokens = ctx.encode_chat(messages)
    await ctx.generate(tokens)
    is_own = tokens == ctx.encode("t8 t1")
    return float(is_own and first == expected != other == expected_other)


async def asks_judge(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """A judge's answer to the first 5 tokens is given; its length makes the reward."""
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    judge = ctx.pool("judge")
    answer = await judge.generate(tokens, 4, temperature=1.0, seed=3)
    assert judge.decode(answer.tokens) == answer.text
    tokens += answer.tokens
    await ctx.generate(tokens)
    return float(len(answer.tokens) + len(answer.logprobs))


async def dies_after_asking(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """One of the loops kills the process, once, when the judge has answered."""
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    answer = await ctx.pool("judge").generate(tokens, 4)
    die_the_first_time(Path(sample["marker"]))
    await ctx.generate(tokens + answer.tokens, max_new_tokens=5)
    return 1.0


async def asks_nobody(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    await ctx.pool("jury").generate([1], 1)
    return 1.0


async def asks_adapters(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    """Answers of two adapters are given; one of the loops then kills the process, once."""
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    tokens += await ctx.generate(tokens, 4, lora="critic")
    tokens += await ctx.generate([1, 2], 3, lora="chance")
    assert ctx.finish_reason == "length"
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    die_the_first_time(Path(sample["marker"]))
    await ctx.generate(tokens, max_new_tokens=5)
    return 1.0


async def asks_judges_adapter(ctx: AgentContext, sample: dict[str, Any]) -> float | None:
    tokens = [*ctx.prompt_tokens]
    tokens += await ctx.generate(tokens, max_new_tokens=5)
    tokens += (await ctx.pool("judge").generate(tokens, 4, lora="critic")).tokens
    await ctx.generate(tokens)
    return 1.0
