"""Looks for a function that users name as `module:function`, without running their code.

For a process that shall not import what the function needs, and tells a mistake before the one that
shall is started: in doubt, nothing. What only running the code would tell is left to
`load_function` and to the first call.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import re
import symtable
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Final

from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.agents.function_call import Calling, call_problem
from umbra.runtime.rollout.agents.user_function import HOW_TO_FIND

_DYNAMIC: Final = re.compile(
    r"import\s*\(?\s*\*|__getattr__|__path__|__dict__|sys\.modules|meta_path|path_hooks"
    r"|(?<![\w.])(globals|vars|locals|setattr|exec|eval)\s*\(|(^|[;:])\s*global\s",
    re.MULTILINE,
)
"""What may give a module names, or modules below it, that its text does not show."""


def check_function(target: str, what: str, folders: Sequence[str], calling: Calling) -> None:
    """Raises ConfigError where importing or calling `module:function` is sure to fail.

    Args:
        what: the setting that names it; stands in the error.
        folders: searched before `sys.path`.
    """
    module_name, _, function_name = target.partition(":")
    try:
        problem = _problem(module_name, function_name, folders, calling)
    except Exception:  # noqa: BLE001 -- the user's import hooks raise what they like
        return
    if problem:
        raise ConfigError(f"{what} {target!r}: {problem}")


def _problem(module_name: str, function_name: str, folders: Sequence[str], calling: Calling) -> str:
    """What is wrong and how to mend it; "" where nothing is, or it is not sure."""
    importlib.invalidate_caches()
    top, *below = module_name.split(".")
    if top in sys.builtin_module_names:
        return ""
    spec = PathFinder.find_spec(top, [*folders, *sys.path]) or importlib.util.find_spec(top)
    if spec is None:
        return f"no module named {top!r}. {HOW_TO_FIND}"
    for part in below:
        inner = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations or [])
        if inner is None:
            return _missing_below(spec, part, function_name)
        spec = inner
    return _wrong_function(spec, function_name, calling)


def _missing_below(parent: ModuleSpec, part: str, function_name: str) -> str:
    if parent.loader is not None:  # else a folder without __init__.py
        source = _source(parent)
        if source is None or _DYNAMIC.search(source):
            return ""
    if part == "py":
        return f"write {f'{parent.name}:{function_name}'!r}, the module without its file's ending"
    places = ", ".join(parent.submodule_search_locations or [str(parent.origin)])
    return f"no module named '{parent.name}.{part}' in {places}"


def _wrong_function(spec: ModuleSpec, function_name: str, calling: Calling) -> str:
    source = _source(spec)
    if source is None:
        return ""
    try:
        with warnings.catch_warnings(action="ignore"):  # its import will give them
            symbols = symtable.symtable(source, str(spec.origin), "exec").get_symbols()
            compile(source, str(spec.origin), "exec", dont_inherit=True)  # `await` in a plain def
            module = ast.parse(source)
    except SyntaxError as error:
        return f"importing {spec.name!r} raises {type(error).__name__}: {error}"
    if _DYNAMIC.search(source):
        return ""
    names = [symbol.get_name() for symbol in symbols if _is_bound(symbol)]
    if function_name in names:
        return call_problem(module, str(spec.origin), function_name, calling)
    close = difflib.get_close_matches(function_name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{spec.origin} has no function {function_name!r}{hint}"


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()


def _source(spec: ModuleSpec) -> str | None:
    """The text of a module in Python; None for other ones."""
    loader = spec.loader
    return loader.get_source(spec.name) if type(loader) is SourceFileLoader else None
