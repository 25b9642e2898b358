"""What is said of an error in a user's function."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from umbra.runtime.engine_api.token_ids import token_ids
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.agents.user_function import describe, load_function


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
def test_the_place_of_an_error_is_the_user_s_innermost_line(function: Callable[[], object]) -> None:
    said = said_of(function)

    line = function.__code__.co_firstlineno
    assert said.endswith(f" ({__file__}:{line} in <lambda>)")


def test_an_error_without_a_line_of_the_user_s_has_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"raised ModuleNotFoundError: No module named '\w+'\."):
        load_function("umbra_knows_no_such_module:f", "reward function")

    (tmp_path / "umbra_test_fails_when_imported.py").write_text("x = 1\n1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigError, match=r"when_imported.py:2 in <module>\)"):
        load_function("umbra_test_fails_when_imported:f", "reward function")
