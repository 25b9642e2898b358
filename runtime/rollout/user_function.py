"""Functions that users name in a config as `module:function`."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any, cast

from umbra.runtime.errors import ConfigError


def load_function(target: str, what: str) -> Callable[..., Any]:
    """Imports `module:function`.

    Args:
        what: what it is for, such as "reward function"; stands in the error.

    Raises:
        ConfigError: it cannot be imported or called; says which and why.
    """
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{what} {target!r} must be written module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            f"{what} {target!r}: importing {module_name!r} raised {describe(error)}. "
            "Install it, have it in the current folder, or name its folder in reward.python_path."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{what} {target!r}: {module.__file__} has no function {function_name!r}")
    return cast(Callable[..., Any], function)


def describe(error: BaseException) -> str:
    """`ValueError: bad digit (rewards.py:12 in reward)`: what was raised, and where."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")  # Python's own: says nothing to its user
    ]
    if not frames:
        return text
    last = frames[-1]
    return f"{text} ({last.filename}:{last.lineno} in {last.name})"
