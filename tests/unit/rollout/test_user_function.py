"""Messages about a user's function that cannot be used, and about errors in it."""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from umbra.runtime.engine_api.generation_request import token_ids
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.agents.agent_loop import AgentLoop
from umbra.runtime.rollout.agents.reward_function import RewardFunction
from umbra.runtime.rollout.agents.user_thread import UserThread
from umbra.runtime.rollout.user_function import advice, describe, load_function


def said_of(function: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        function()
    return describe(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1 / 0,
        lambda: token_ids([-1]),  # umbra's line
        lambda: json.loads("{"),  # Python's
        lambda: importlib.import_module("umbra_knows_no_such_module"),
    ],
)
def test_the_location_of_an_error_is_the_user_s_innermost_line(
    function: Callable[[], object],
) -> None:
    said = said_of(function)

    line = function.__code__.co_firstlineno
    assert said.endswith(f" ({__file__}:{line} in <lambda>)")


def test_a_group_of_errors_names_the_first_and_how_many_more() -> None:
    async def tool(answer: str) -> float:
        return float(answer)

    async def call_tools() -> None:
        async with asyncio.TaskGroup() as calls:
            for answer in ("x", "1", "y"):
                calls.create_task(tool(answer))

    said = said_of(lambda: asyncio.run(call_tools()))

    line = tool.__code__.co_firstlineno + 1
    place = f" ({__file__}:{line} in tool)"
    assert said == f"ValueError: could not convert string to float: 'x'{place} and 1 more"

    full = ExceptionGroup("calls", [OSError(errno.ENOSPC, "No space left on device")])
    assert "the disk that it writes to is full" in advice(full, "")


def test_an_error_without_a_line_of_the_user_s_has_no_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"raised ModuleNotFoundError: No module named '\w+'\."):
        load_function("umbra_knows_no_such_module:f", "reward.function")

    (tmp_path / "umbra_test_fails_when_imported.py").write_text("x = 1\n1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match=r"when_imported.py:2 in <module>\)"):
        load_function("umbra_test_fails_when_imported:f", "reward.function")

    program = "import argparse as a\np = a.ArgumentParser()\np.parse_args(['x'])\n"
    (tmp_path / "umbra_test_ends_when_imported.py").write_text(program)
    with pytest.raises(ConfigError, match=r"raised SystemExit: 2 \(.*when_imported.py:3 in <mod"):
        load_function("umbra_test_ends_when_imported:f", "reward.function")


@pytest.mark.parametrize("name", ["time", "statistics"])  # time is part of the interpreter
def test_a_file_named_like_a_module_of_python_is_answered_with_that(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module(name)  # as umbra or a library may have done before
    (tmp_path / f"{name}.py").write_text("def exact(**columns): ...\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with pytest.raises(ConfigError) as caught:
        load_function(f"{name}:exact", "reward.function")

    assert str(caught.value) == (
        f"reward.function '{name}:exact': Python's own {name} has no function 'exact': "
        "give your file another name"
    )


def test_a_function_of_a_folder_is_answered_with_how_to_name_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "umbra_test_rewards").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with pytest.raises(ConfigError) as caught:
        load_function("umbra_test_rewards:exact", "reward.function")

    assert str(caught.value).endswith(
        f": the folder {tmp_path}/umbra_test_rewards has no function 'exact'. "
        "Write 'umbra_test_rewards.FILE:exact', the file without .py"
    )


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("umbra_knows_no_such_module", r" must be written module:function"),
        (
            "umbra_knows_no_such_module:f",
            r".*No module named '\w+'\. Install it, .*reward.python_path\.$",
        ),
        ("test_user_function.py:plain", r".* Write 'test_user_function:plain', .* without .py"),
        (
            "test_user_function:plane",
            r".*test_user_function.py has no function 'plane'; did .*'plain",
        ),
        ("test_user_function:LOOPS", r".*test_user_function.py has no function 'LOOPS'$"),
    ],
)
def test_a_function_that_is_not_there_is_named_with_the_setting(target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward.function '{target}':?{said}"):
        load_function(target, "reward.function")


def plain(ctx: Any, sample: Any) -> float:
    return 1.0


def yields(ctx: Any, sample: Any) -> Any:
    yield 1.0


async def one(ctx: Any) -> None: ...
async def three(ctx: Any, sample: Any, db: Any) -> None: ...
async def by_name(ctx: Any, sample: Any, *, db: Any) -> None: ...
async def good(ctx: Any, sample: Any) -> None: ...
async def all_of_it(*arguments: Any) -> None: ...
async def more(ctx: Any, sample: Any, n: int = 3, /, m: int = 4, *, k: int = 5) -> None: ...


with_db = functools.partial(three, db=3)


@functools.wraps(three)
def gives_db(ctx: Any, sample: Any) -> Any:
    return three(ctx, sample, 3)


class Loop:
    async def __call__(self, ctx: Any, sample: Any) -> None: ...


an_object = Loop()
LOOPS = ["good", "all_of_it", "more", "with_db", "gives_db", "an_object"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", r"plain is not async; write `async def plain`$"),
        ("yields", r"yields is not async"),
        (
            "one",
            r".*test_user_function.py:\d+: one\(ctx.* is called as one\(ctx, sample\): too many",
        ),
        ("three", r".* is called as three\(ctx, sample\): missing a required argument: 'db'"),
        ("by_name", r".* is called as by_name\(ctx, sample\): missing a required .*'db'"),
        *((name, "") for name in LOOPS),
    ],
)
def test_an_agent_loop_that_cannot_be_called_as_it_will_be_is_refused(name: str, said: str) -> None:
    target = f"test_user_function:{name}"

    if not said:
        AgentLoop(target, UserThread("user"))
        return
    with pytest.raises(ConfigError, match=rf"^rollout.agent '{target}': {said}"):
        AgentLoop(target, UserThread("user"))


def columns(prompts: Any, completions: Any, answer: Any, *, level: int = 1) -> None: ...
def some_columns(completions: Any, **columns: Any) -> None: ...
def anything(*prompts: Any, **columns: Any) -> None: ...
def no_prompts(completions: Any, answer: Any) -> None: ...
def by_position(prompts: Any, completions: Any, /) -> None: ...


@functools.wraps(by_position)
def by_keyword(**columns: Any) -> None:
    by_position(columns["prompts"], columns["completions"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "") for name in ["columns", "some_columns", "anything", "by_keyword"]),
        ("no_prompts", r"no_prompts\(prompts=, completions=, answer=\): .* 'prompts'"),
        ("by_position", r"by_position\(prompts=, completions=\): "),
    ],
)
def test_a_reward_function_that_cannot_be_called_as_it_will_be_is_refused(
    name: str, said: str
) -> None:
    target = f"test_user_function:{name}"

    if not said:
        RewardFunction(target, UserThread("user"), 1.0)
        return
    with pytest.raises(ConfigError, match=rf"^reward.function '{target}': .* is called as {said}"):
        RewardFunction(target, UserThread("user"), 1.0)
