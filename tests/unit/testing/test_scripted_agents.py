"""The `ctx` for tests of agent loops answers from its script, and checks what a run would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from umbra.runtime.errors import RequestRefused, RolloutError
from umbra.runtime.rollout.agents.auxiliary_pool import AuxiliaryPool
from umbra.runtime.rollout.dispatch.trajectory import NOT_GENERATED
from umbra.runtime.testing.scripted_agents import ScriptedContext, ScriptedPool

SAMPLE = {"prompt": "2+3=", "answer": "5"}

Loop = Callable[[ScriptedContext], Awaitable[object]]


def run(ctx: ScriptedContext, loop: Loop) -> object:
    async def call() -> object:
        return await loop(ctx)

    return asyncio.run(call())


def test_turns_and_given_text_between_them_are_distinguished() -> None:
    ctx = ScriptedContext(SAMPLE, ["6", "5"])

    async def loop(ctx: ScriptedContext) -> None:
        tokens = [*ctx.prompt_tokens]
        tokens += await ctx.generate(tokens)
        tokens += ctx.encode(" no: ")
        tokens += await ctx.generate(tokens)
        assert ctx.decode(tokens) == "2+3=6 no: 5"

    run(ctx, loop)

    assert ctx.trajectory.segments() == [(0, 1, 0), (1, 6, NOT_GENERATED), (6, 7, 0)]


def test_a_loop_that_leaves_its_trajectory_gets_the_error_of_a_run() -> None:
    async def loop(ctx: ScriptedContext) -> None:
        await ctx.generate(ctx.prompt_tokens)
        await ctx.generate(ctx.prompt_tokens)

    with pytest.raises(RolloutError, match="differ from the trajectory at position 4 of 5"):
        run(ScriptedContext(SAMPLE, ["6", "5"]), loop)


def test_answers_are_cut_by_what_is_asked_for_and_by_the_budget() -> None:
    async def loop(ctx: ScriptedContext) -> list[tuple[str, str]]:
        tokens, said = [*ctx.prompt_tokens], list[tuple[str, str]]()
        for limit in (3, None, None):
            new = await ctx.generate(tokens, limit)
            tokens += new
            said.append((ctx.decode(new), ctx.finish_reason))
        return said

    said = run(ScriptedContext(SAMPLE, ["56", "1234", "unheard"], budget=5), loop)

    assert said == [("56", "stop"), ("123", "length"), ("", "length")]


def test_a_script_that_is_over_names_its_pool() -> None:
    async def asks_a_judge(ctx: ScriptedContext) -> None:
        judge = ctx.pool("judge")
        assert (await judge.complete("5?", 2)).text == "ye"
        await judge.chat([{"role": "user", "content": "really?"}])

    with pytest.raises(
        AssertionError, match="the pool 'judge' got one more request; the script has"
    ):
        run(ScriptedContext(SAMPLE, [], pools={"judge": ["yes"]}), asks_a_judge)


def test_there_are_no_other_pools_and_tokens_are_integers() -> None:
    async def asks_nobody(ctx: ScriptedContext) -> None:
        ctx.pool("jduge")

    async def gives_text(ctx: ScriptedContext) -> None:
        await ctx.generate("2+3")  # pyright: ignore[reportArgumentType]

    with pytest.raises(RolloutError, match="no pool 'jduge' to ask; there are: judge"):
        run(ScriptedContext(SAMPLE, [], pools={"judge": []}), asks_nobody)
    with pytest.raises(RequestRefused, match="1-D sequence of integer token ids"):
        run(ScriptedContext(SAMPLE, ["5"]), gives_text)


def test_adapters_speak_beside_the_trajectory_and_what_is_done_once_is_kept() -> None:
    ctx = ScriptedContext(SAMPLE, ["hello", "5"])

    async def loop(ctx: ScriptedContext) -> list[str]:
        aside = await ctx.generate(ctx.encode("user:"), lora="user")
        answer = await ctx.generate(ctx.prompt_tokens)
        drawn = [await ctx.once("draw", lambda: "a"), await ctx.once("draw", lambda: "b")]
        return [ctx.decode(aside), ctx.decode(answer), *drawn]

    assert run(ctx, loop) == ["hello", "5", "a", "a"]
    assert ctx.trajectory.segments() == [(0, 1, 0)]


def test_a_scripted_pool_has_all_that_a_pool_has() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(AuxiliaryPool) - {"encode", "decode"} == public(ScriptedPool)
