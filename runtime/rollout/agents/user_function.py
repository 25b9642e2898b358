"""Functions that users name in a config as `module:function`."""

from __future__ import annotations

import importlib
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import umbra
from umbra.runtime.disk import is_full_disk
from umbra.runtime.errors import ConfigError, RolloutError

HOW_TO_FIND: Final = (
    "Install it, have it in the current folder, or name its folder in reward.python_path."
)

_UMBRA: Final = Path(umbra.__path__[0])
_PYTHON: Final = Path(sysconfig.get_path("stdlib"))
_LIBRARIES: Final = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]


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
            f"{what} {target!r}: importing {module_name!r} raised {describe(error)}. {HOW_TO_FIND}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{what} {target!r}: {module.__file__} has no function {function_name!r}")
    return cast(Callable[..., Any], function)


def describe(error: BaseException) -> str:
    """`ValueError: bad digit (rewards.py:12 in reward)`: what was raised, and where.

    The place is the innermost in the user's own files, else in a library that they use; umbra's
    and Python's own lines say nothing to its author.
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    frame = place_in_user_code(traceback.extract_tb(error.__traceback__))
    return f"{text} ({frame.filename}:{frame.lineno} in {frame.name})" if frame else text


def is_mistake_in_code(error: BaseException) -> bool:
    """To be mended, not caught: it comes whatever the model or a tool says."""
    if isinstance(error, RolloutError | NameError | ImportError | SyntaxError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return place_in_user_code(frames) is None  # the call itself failed


def advice(error: BaseException, usual: str) -> str:
    """What to do about an error of user code, to follow its description.

    Args:
        usual: for what may come of what the model or a tool says.
    """
    if is_full_disk(error):
        return "; the disk that it writes to is full: free some space (prints go to the run's logs)"
    return "" if is_mistake_in_code(error) else usual


def place_in_user_code(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost in the user's own files, else in a library that they use, if any."""
    for kind in ("user", "library"):
        for frame in reversed(frames):
            if _kind_of_file(frame.filename) == kind:
                return frame
    return None


def _kind_of_file(name: str) -> str:
    if name.startswith("<") or _UMBRA in Path(name).parents:
        return "umbra or Python"
    if any(folder in Path(name).parents for folder in _LIBRARIES):  # they may lie below Python's
        return "library"
    return "umbra or Python" if _PYTHON in Path(name).parents else "user"
