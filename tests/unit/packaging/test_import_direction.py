"""Folders import downward, names are unique, and those that texts or users name exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

import umbra.runtime

ROOT: Final = Path(__file__).resolve().parents[3]

LAYERS: Final = (
    ("runtime",),
    (
        "runtime.engine_api",
        "runtime.process",
        "runtime.rollout",
        "runtime.rpc",
        "runtime.tracing",
    ),
    (
        "runtime.cluster",
        "runtime.text",
        "runtime.weights",
    ),
    (
        "runtime.actor",
        "runtime.weights.image",
        "trainer.config",
        "trainer.torchrun_plugin",
        "trainer.world",
    ),
    (
        "engines.faulty",
        "runtime.reports",
        "runtime.rollout.dispatch",
        "runtime.weights.exports",
        "runtime.weights.links",
        "trainer.algorithms",
        "trainer.data",
    ),
    (
        "engines.loading",
        "runtime.pools",
        "runtime.rollout.ledger",
        "trainer.model",
    ),
    (
        "engines.shell",
        "runtime.rollout.agents",
        "runtime.supervisor",
        "trainer.checkpoint",
    ),
    (
        "engines.echo",
        "engines.embedded",
        "engines.sglang",
        "engines.vllm",
        "runtime.dash",
        "runtime.node",
        "runtime.rollout.manager",
        "runtime.session",
    ),
    (
        "runtime.cli",
        "runtime.testing",
        "trainer.reporting",
    ),
    (
        "trainer.quickstart",
        "trainer.services",
    ),
    (
        "trainer",
        "trainer.serving",
    ),
    ("trainer.replay", "trainer.sft"),
    ("trainer.doctor",),
)
"""From the lowest to the highest. A module belongs to the part with the longest name that its own
name begins with. It imports from that part and from lower layers, not from the same layer's other
parts."""
NOT_IMPORTED_BY: Final = {"engines": ("trainer", "runtime.rollout"), "trainer": ("engines",)}
COMMON_NAMES: Final = ("__init__", "__main__", "base")


@cache
def module_paths() -> dict[str, Path]:
    """The files of all modules by their names below `umbra`."""
    paths: dict[str, Path] = {}
    for folder in ("runtime", "engines", "trainer"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@cache
def imported_by(module: str) -> frozenset[str]:
    """The modules of umbra that a module imports anywhere, also in functions and for types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module_paths()[module].read_text())):
        match node:
            case ast.ImportFrom(module=str(source), names=names):
                found.update(f"{source}.{alias.name}" for alias in names)
                found.add(source)
            case ast.Import(names=names):
                found.update(alias.name for alias in names)
            case _:
                pass
    ours = {name.removeprefix("umbra.") for name in found if name.startswith("umbra.")}
    return frozenset(name for name in ours if name in module_paths() and not is_package(name))


def is_package(module: str) -> bool:
    return module_paths()[module].name == "__init__.py"


def place_of(module: str) -> tuple[int, str]:
    """The index of a module's layer, and its part there."""
    parts = [(idx, part) for idx, layer in enumerate(LAYERS) for part in layer]
    fitting = [(idx, part) for idx, part in parts if f"{module}.".startswith(f"{part}.")]
    assert fitting, f"{module} is in no layer: add its part to LAYERS"
    return max(fitting, key=lambda place: len(place[1]))


def all_imports() -> Iterator[tuple[str, str]]:
    for module in module_paths():
        if not is_package(module):
            yield from ((module, imported) for imported in imported_by(module))


def test_imports_run_downward() -> None:
    upward: list[str] = []
    for module, imported in all_imports():
        (layer, part), (below, other) = place_of(module), place_of(imported)
        if part != other and below >= layer:
            upward.append(f"{module} imports {imported}")

    assert upward == []


@pytest.mark.parametrize("part", NOT_IMPORTED_BY)
def test_engines_and_trainer_import_each_other_by_name_only(part: str) -> None:
    forbidden = NOT_IMPORTED_BY[part]

    found = [
        f"{module} imports {imported}"
        for module, imported in all_imports()
        if module.split(".")[0] == part and imported.startswith(forbidden)
    ]

    assert found == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: imported_by(module) for module in module_paths()}).prepare()


def test_no_two_modules_share_a_name() -> None:
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for module, path in module_paths().items():
        if path.stem not in COMMON_NAMES:
            modules[path.stem].append(module)

    assert [shared for shared in modules.values() if len(shared) > 1] == []


def test_no_two_public_classes_share_a_name() -> None:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module, path in module_paths().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)

    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


REPOSITORY = Path(__file__).parents[3]
FOLDERS = ("runtime", "engines", "trainer", "tests")
NAME = re.compile(r"\bumbra([./])((?:runtime|engines|trainer)(?:\1\w+)*)")


def named_modules() -> Iterator[tuple[str, str]]:
    """(where, path from the repository) of each module that a text names; docstrings included."""
    for folder in FOLDERS:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for separator, name in NAME.findall(node.value):
                        where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                        yield where, name.replace(separator, "/")


def exists(name: str) -> bool:
    """Whether it is a module, a folder, or a name in a module."""
    path = REPOSITORY / name
    return path.is_dir() or any(Path(f"{module}.py").is_file() for module in (path, path.parent))


def test_modules_that_texts_name_exist() -> None:
    named = list(named_modules())

    gone = [f"{where}: {name}" for where, name in named if not exists(name)]

    assert len(named) > 100
    assert not gone, "\n".join(gone)


@pytest.mark.parametrize("name", umbra.runtime.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(umbra.runtime, name).__name__ == name
