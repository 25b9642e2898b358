"""What is told of a user's function without running their code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.agents.function_call import AGENT_CALL, REWARD_CALL, Calling
from umbra.runtime.rollout.agents.function_lookup import check_function

SOURCE = """
raise SystemExit("this code is not to be run")
import json as tool
from rewards_of_others import theirs
def score(prompts, completions): ...
class Judge:
    def method(self): ...
if True:
    async def in_a_branch(**columns): ...
made = lambda: 0
tool.model.eval()  # and its modules, by exec, with a global one
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has a module, a package, and a folder without __init__.py."""
    (tmp_path / "found_rewards.py").write_text(SOURCE)
    for name, source in {
        "found_package": "from found_package.inner import score\n",
        "found_folder": None,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "inner.py").write_text(SOURCE)
        if source is not None:
            (tmp_path / name / "__init__.py").write_text(source)
    return tmp_path


def check(folder: Path, target: str, calling: Calling = REWARD_CALL) -> None:
    check_function(target, "reward.function", [str(folder)], calling)


@pytest.mark.parametrize(
    "target",
    [
        "found_rewards:score",
        "found_rewards:Judge",
        "found_rewards:in_a_branch",
        "found_rewards:made",
        "found_rewards:tool",
        "found_rewards:theirs",
        "found_package:score",
        "found_package.inner:score",
        "found_folder.inner:score",
        "umbra.trainer.quickstart.quickstart_task:reward",
        "json:dumps",
        "os.path:join",
        "time:sleep",
        "math:sqrt",
    ],
)
def test_nothing_is_said_of_what_is_there(folder: Path, target: str) -> None:
    check(folder, target)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_rewards:f", r"no module named 'no_such_rewards'. Install it, .*python_path"),
        ("no_such_rewards.inner:f", r"no module named 'no_such_rewards'"),
        ("found_package.outer:f", r"no module named 'found_package.outer' in .*/found_package$"),
        ("found_folder.outer:f", r"no module named 'found_folder.outer' in .*/found_folder"),
        ("found_rewards.inner:f", r"no module named 'found_rewards.inner' in .*/found_rewards.py"),
        ("found_rewards.py:score", r"write 'found_rewards:score', the module without"),
        (
            "found_rewards:scores",
            r"found_rewards.py has no function 'scores'; did you .* 'score'\?",
        ),
        ("found_rewards:method", r"found_rewards.py has no function 'method'$"),
        ("found_package.inner:nope", r"inner.py has no function 'nope'"),
    ],
)
def test_what_is_surely_missing_is_told(folder: Path, target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward.function '{target}': .*{said}"):
        check(folder, target)


@pytest.mark.parametrize(
    "more",
    [
        "from somewhere import *",
        "def __getattr__(name): ...",
        "globals()['late'] = 1",
        "def make():\n    global late\n    late = 1",
        "setattr(sys.modules[__name__], 'late', 1)",
    ],
)
def test_a_module_that_may_get_names_while_it_is_imported_is_left_to_its_import(
    tmp_path: Path, more: str
) -> None:
    (tmp_path / "dynamic_rewards.py").write_text(f"{SOURCE}\n{more}\n")
    (tmp_path / "dynamic_package").mkdir()
    (tmp_path / "dynamic_package/__init__.py").write_text("__path__.append('elsewhere')")

    check(tmp_path, "dynamic_rewards:late")
    check(tmp_path, "dynamic_package.inner:score")


def test_a_module_that_is_not_python_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "broken_rewards.py").write_text("x = 1\ndef score(:\n")

    with pytest.raises(ConfigError, match=r"raises SyntaxError: .*broken_rewards.py, line 2"):
        check(tmp_path, "broken_rewards:score")


def test_an_import_hook_that_fails_leaves_it_to_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, *arguments: object) -> None:
            raise RuntimeError("hook")

    monkeypatch.setattr(sys, "meta_path", [Broken()])

    check(tmp_path, "hooked_rewards:score")


AGENTS = """
import functools
def score_at_once(ctx, sample):
    answer = ctx.generate(ctx.prompt_tokens)
    return 1.0 if answer else 0.0
def adds_up(ctx, sample):
    score = 0.0
    score += len(sample)
    return score
def nothing(ctx, sample): ctx.generate([1])
def yields(ctx, sample): yield 1
async def one(ctx): ...
async def three(ctx, sample, db): ...
async def by_name(ctx, sample, *, db): ...
async def good(ctx, sample): ...
async def all_of_it(*arguments): ...
async def more(ctx, sample, n=3, /, m=4, *, k=5, **settings): ...
def hands_on(ctx, sample): return good(ctx, sample)
def hands_on_later(ctx, sample):
    later = good(ctx, sample)
    return later
@functools.cache
def decorated(ctx): ...
def twice(ctx): ...
twice = functools.partial(three, db=3)
class Tool:
    def good(self): ...
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("score_at_once", r":3: score_at_once is no async function; write `async def score_at_on"),
        ("adds_up", r":6: adds_up is no async function"),
        ("nothing", r":10: nothing is no async function"),
        ("yields", r":11: yields is no async function"),
        ("one", r":12: one\(ctx\) is called as one\(ctx, sample\): too many positional"),
        ("three", r":13: three\(ctx, sample, db\) is called as .*: missing .* argument: 'db'"),
        ("by_name", r":14: by_name\(ctx, sample, \*, db\) is called as .*'db'"),
        *((name, "") for name in ["good", "all_of_it", "more", "hands_on", "hands_on_later"]),
        *((name, "") for name in ["decorated", "twice", "Tool"]),
    ],
)
def test_an_agent_loop_that_surely_cannot_be_called_is_told(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "called_agents.py").write_text(AGENTS)

    if not said:
        check(tmp_path, f"called_agents:{name}", AGENT_CALL)
        return
    with pytest.raises(ConfigError, match=rf"/called_agents.py{said}"):
        check(tmp_path, f"called_agents:{name}", AGENT_CALL)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("prompts, completions, answer, *, level=1", ""),
        ("completions, **columns", ""),
        ("*prompts, **columns", ""),
        ("completions, answer", r"called as score\(prompts=, completions=\): .* 'prompts'"),
        ("prompts, completions, /", r"called as score\(prompts=, completions=\): "),
    ],
)
def test_a_reward_function_that_surely_cannot_be_called_is_told(
    tmp_path: Path, parameters: str, said: str
) -> None:
    (tmp_path / "called_rewards.py").write_text(f"def score({parameters}): ...\n")

    if not said:
        check(tmp_path, "called_rewards:score", REWARD_CALL)
        return
    with pytest.raises(ConfigError, match=said):
        check(tmp_path, "called_rewards:score", REWARD_CALL)


def test_await_in_a_function_that_is_not_async_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "awaiting.py").write_text("def run(ctx, sample):\n    await ctx.generate([1])\n")

    with pytest.raises(ConfigError, match=r"SyntaxError: 'await' outside async .*, line 2"):
        check(tmp_path, "awaiting:run", AGENT_CALL)
