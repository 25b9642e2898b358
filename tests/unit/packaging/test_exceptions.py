"""Every exception of umbra survives a pickle: torch carries those of one rank to the others so."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from umbra.runtime.errors import first_leaf

pytestmark = pytest.mark.slow  # imports torch

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES: dict[str, Any] = {
    "int": 7,
    "str": "some text",
    "str | None": "some text",
    "signal.Signals": signal.SIGTERM,
}
"""An argument of each type that a constructor of an exception takes."""


def exception_names() -> list[tuple[str, str]]:
    """(module, class) of every class that derives from an exception, by the names of the bases."""
    classes: list[tuple[str, str, set[str]]] = []
    for path in sorted(ROOT.glob("[ret]*/**/*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in ("runtime", "engines", "trainer"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                    classes.append((".".join(("umbra", *parts)), node.name, bases))
    known = {name for name, value in vars(builtins).items() if _is_exception(value)}
    while True:
        more = {name for _, name, bases in classes if bases & known} - known
        if not more:
            return [(module, name) for module, name, bases in classes if bases & known]
        known |= more


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


@pytest.mark.parametrize(("module", "name"), exception_names())
def test_an_exception_is_the_same_after_a_pickle(module: str, name: str) -> None:
    kind: Any = getattr(importlib.import_module(module), name)
    positional: list[Any] = ["some text"]
    keywords: dict[str, Any] = {}
    if "__init__" in vars(kind):
        _, *parameters = inspect.signature(kind.__init__).parameters.values()
        by_name = {each.name: EXAMPLES[each.annotation] for each in parameters}
        keywords = {e.name: by_name.pop(e.name) for e in parameters if e.kind == e.KEYWORD_ONLY}
        positional = list(by_name.values())
    error: BaseException = kind(*positional, **keywords)
    error.add_note("a note")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert (str(copy), copy.args) == (str(error), error.args)
    assert vars(copy) == vars(error)


def test_the_exceptions_are_found() -> None:
    found = exception_names()

    assert ("umbra.runtime.errors", "ConnectionLost") in found
    assert ("umbra.trainer.world.signals", "StopNow") in found
    assert len(found) > 25


def test_the_first_exception_in_a_tree_of_groups_is_found() -> None:
    first = KeyError("first")
    inner = ExceptionGroup("inner", [first, ValueError("second")])

    assert first_leaf(ExceptionGroup("outer", [inner, ValueError("third")])) is first
