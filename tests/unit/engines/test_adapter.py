"""The adapter's view of its core after calls that fail, or are cancelled, half way."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from engine_runs import Collector, collect, on_the_engines_loop, running, wire_request
from scripted_core import ScriptedCore

from umbra.engines.shell.adapter_engine import AdapterEngine, warm_up
from umbra.engines.shell.engine_shell import Changes
from umbra.runtime.actor.actor_spec import load_target, make_target
from umbra.runtime.engine_api.engine_names import ENGINES, engine_target
from umbra.runtime.errors import ConfigError, EngineError


def engine_over(core: ScriptedCore) -> AdapterEngine:
    return AdapterEngine(core, max_num_seqs=4, max_context_len=64, tick_ms=1.0, load_weights=True)


@on_the_engines_loop
async def test_the_core_is_stopped_though_the_image_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError("no such descriptor")

    core = ScriptedCore()
    engine = engine_over(core)
    with pytest.raises(OSError, match="no such descriptor"):
        async with engine:
            monkeypatch.setattr(engine._weights._image, "close", fail)  # pyright: ignore
    assert core.done[-1] == "stop"


@on_the_engines_loop
async def test_a_start_that_is_cancelled_stops_the_core() -> None:
    core = ScriptedCore()
    core.may_go_on.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), engine_over(core):
            pass
    assert core.done == ["stop"]


@on_the_engines_loop
async def test_the_first_request_is_waited_for_without_asking_again_and_again() -> None:
    core, dying = ScriptedCore(), ScriptedCore()
    core.tokens_come.clear()
    dying.tokens_come.clear()
    loop = asyncio.get_running_loop()

    loop.call_later(0.05, core.tokens_come.set)
    await warm_up(core)
    loop.call_later(0.05, dying.died.set)
    with pytest.raises(EngineError, match="of scripted ended at its first request"):
        await warm_up(dying)

    assert (core.outputs[0].num_asked, dying.outputs[0].num_asked) == (2, 2)


Call = Callable[[AdapterEngine], Coroutine[Any, Any, object]]


async def cut_off(core: ScriptedCore, call: Coroutine[Any, Any, object]) -> None:
    """Cancels the call while the core is at it, and leaves the core there."""
    core.may_go_on.clear()
    core.has_begun.clear()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(call)
        await core.has_begun.wait()
        task.cancel()


CUT: list[tuple[list[Call], Call, Call, list[str]]] = [
    ([], lambda e: e.pause("abort"), lambda e: e.resume(), ["pause", "resume"]),
    (
        [lambda e: e.pause("abort")],
        lambda e: e.sleep(1),
        lambda e: e.wake(["weights", "kv_cache"]),
        ["pause", "sleep 1", "wake weights kv_cache"],
    ),
    (
        [lambda e: e.pause("abort"), lambda e: e.sleep(1)],
        lambda e: e.wake(["weights", "kv_cache"]),
        lambda e: e.resume(),
        ["wake weights kv_cache", "resume"],
    ),
    ([], lambda e: e.probe_import([]), lambda e: e.pause("keep"), ["probe", "pause"]),
]
# Calls before it, the one that is cut off, one after it, and what the core is to have done then.


@pytest.mark.parametrize(
    ("before", "call", "after", "done"), CUT, ids=["pause", "sleep", "wake", "probe_import"]
)
@on_the_engines_loop
async def test_a_call_that_is_cancelled_half_way_is_done_before_the_next_one(
    before: list[Call], call: Call, after: Call, done: list[str]
) -> None:
    core = ScriptedCore()
    async with engine_over(core) as engine:
        for each in before:
            await each(engine)
        core.done.clear()
        await cut_off(core, call(engine))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(after(engine))
            await asyncio.sleep(0)
            assert not core.done
            core.may_go_on.set()
        assert core.done == done


@on_the_engines_loop
async def test_requests_whose_submission_was_cancelled_half_way_run_all_the_same() -> None:
    core, collector = ScriptedCore(), Collector()
    engine = engine_over(core)
    async with running(engine):
        await cut_off(core, engine.submit([wire_request(i, [1, 2]) for i in range(2)]))
        core.may_go_on.set()
        await collect(engine, collector, 2)
    assert [len(collector[i].tokens) for i in range(2)] == [8, 8]


@on_the_engines_loop
async def test_requests_that_wait_when_their_consumer_goes_are_not_the_next_one_s() -> None:
    core, collector = ScriptedCore(), Collector()
    engine = engine_over(core)
    async with running(engine):
        async with aclosing(engine.deltas()) as batches, asyncio.TaskGroup() as tasks:
            await anext(batches)
            await cut_off(core, engine.probe_import([]))
            waiting = tasks.create_task(engine.submit([wire_request(1, [1, 2])]))
            await asyncio.sleep(0)
            waiting.cancel()
        core.may_go_on.set()
        await engine.submit([wire_request(1, [3, 4], max_new_tokens=3)])
        await collect(engine, collector, 1)
    assert len(collector[1].tokens) == 3
    assert core.done.count("add") == 2  # of which one is the engine's own


@on_the_engines_loop
async def test_a_call_that_is_cancelled_before_it_began_is_done_in_its_turn() -> None:
    core = ScriptedCore()
    async with engine_over(core) as engine:
        await engine.pause("abort")
        await cut_off(core, engine.sleep(1))
        async with asyncio.TaskGroup() as tasks:
            queued = tasks.create_task(engine.wake(["weights", "kv_cache"]))
            await asyncio.sleep(0)
            queued.cancel()
        core.may_go_on.set()
        await engine.resume()
        assert core.done[-4:] == ["pause", "sleep 1", "wake weights kv_cache", "resume"]


@on_the_engines_loop
async def test_a_change_that_fails_fails_its_caller_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(may_go_on: asyncio.Event) -> None:
        await may_go_on.wait()
        raise EngineError("it broke")

    async def succeed() -> int:
        return 7

    may_go_on = asyncio.Event()
    async with Changes() as changes:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await changes.make(lambda: fail(may_go_on))
        may_go_on.set()
        with pytest.raises(EngineError, match="it broke"):
            await changes.make(lambda: fail(may_go_on))
        assert await changes.make(succeed) == 7
    assert "an engine change failed after its caller left" in caplog.text


@on_the_engines_loop
async def test_leaving_ends_what_is_under_way_and_who_waits_for_it() -> None:
    async with asyncio.TaskGroup() as tasks, Changes() as changes:
        waiting = [tasks.create_task(changes.make(asyncio.Event().wait)) for _ in range(2)]
        await asyncio.sleep(0)
    assert all(task.cancelled() for task in waiting)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_setting_that_an_engine_does_not_have_is_named_with_those_it_has(name: str) -> None:
    given = {"model_path": "model", "max_context_len": 64, "speed": 1}
    with pytest.raises(ConfigError, match=r"'speed'; it takes model_path, .*max_context_len"):
        make_target(engine_target(name), given)


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_known_of_an_engine_before_it_is_imported_is_true(name: str) -> None:
    kind = ENGINES[name]

    taken = inspect.signature(load_target(kind.target)).parameters.values()

    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken)
    names = {parameter.name for parameter in taken}
    assert kind.wraps_library == ("engine_args" in names)
    assert kind.has_lora == (takes_all or "lora_adapters" in names)
