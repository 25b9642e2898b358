"""Functions of the user, named in the config as `module:function`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import umbra
from umbra.runtime.disk import is_full_disk
from umbra.runtime.errors import ConfigError, RolloutError

_UMBRA: Final = Path(umbra.__path__[0])
_PYTHON: Final = Path(sysconfig.get_path("stdlib"))
_LIBRARIES: Final = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]


def load_function(target: str, setting: str) -> Callable[..., Any]:
    """Imports `module:function`. Raises ConfigError with `setting` and the cause."""
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{setting} {target!r} must be written module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        if isinstance(error, SystemExit) and type(error) is not SystemExit:
            raise  # a signal ends this process
        raise ConfigError(
            f"{setting} {target!r}: importing {module_name!r} raised {describe(error)}"
            f"{_how_to_find(module_name, function_name, error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        close = difflib.get_close_matches(function_name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        place = getattr(module, "__file__", None)
        if module_name in sys.stdlib_module_names:
            place, hint = f"Python's own {module_name}", ": give your file another name"
        elif place is None:  # a folder: Python imports it where no file has the name
            place = f"the folder {module.__path__[0]}"
            hint = f". Write '{module_name}.FILE:{function_name}', the file without .py"
        raise ConfigError(f"{setting} {target!r}: {place} has no function {function_name!r}{hint}")
    return cast(Callable[..., Any], function)


def _how_to_find(module_name: str, function_name: str, error: BaseException) -> str:
    if module_name.endswith(".py"):
        return f". Write {f'{module_name[:-3]}:{function_name}'!r}, the module without .py."
    if isinstance(error, ImportError):
        return (
            ". Install it, have it in the current folder, or name its folder in reward.python_path."
        )
    return ""


def check_call(
    function: Callable[..., Any], setting: str, positional: Sequence[str], keywords: Sequence[str]
) -> None:
    """Raises ConfigError if the function cannot be called with these arguments."""
    # A wrapper is checked itself, not the function that it wraps.
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a function written in C without a signature
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        arguments = ", ".join([*positional, *(f"{keyword}=" for keyword in keywords)])
        raise ConfigError(
            f"{setting}: {_location_of(function)}{name}{signature} is called as "
            f"{name}({arguments}): {error}"
        ) from None


def _location_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether the function is an `async def`, or an object whose `__call__` is."""
    return inspect.iscoroutinefunction(function) or (
        inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    )


def describe(error: BaseException) -> str:
    """Names the error and where it was raised: `ValueError: bad digit (rewards.py:12 in reward)`.
    Frames of umbra and of Python are left out. A group has the place of its first
    error, and the number of others."""
    error, num_more = _first_of(error)
    more = f" and {num_more} more" if num_more else ""
    text = "".join(traceback.format_exception_only(error)).strip()
    frame = frame_in_user_code(traceback.extract_tb(error.__traceback__))
    place = f" ({frame.filename}:{frame.lineno} in {frame.name})" if frame else ""
    return f"{text}{place}{more}"


def _first_of(error: BaseException) -> tuple[BaseException, int]:
    """The first error of a group, as TaskGroup raises it, and the number of others."""
    if not isinstance(error, BaseExceptionGroup):
        return error, 0
    members = cast(BaseExceptionGroup[BaseException], error).exceptions
    found = [_first_of(each) for each in members]
    return found[0][0], sum(more + 1 for _, more in found) - 1


def is_mistake_in_code(error: BaseException) -> bool:
    """Whether the error does not depend on any output, so that it must be fixed, not caught."""
    if isinstance(error, RolloutError | NameError | ImportError | SyntaxError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return frame_in_user_code(frames) is None  # the call itself failed


def advice(error: BaseException, usual: str) -> str:
    """The remedy for an error of user code; `usual` if it may depend on a model or a tool."""
    error, _ = _first_of(error)
    if is_full_disk(error):
        return "; the disk that it writes to is full: free some space (prints go to the run's logs)"
    return "" if is_mistake_in_code(error) else usual


def frame_in_user_code(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost frame in the user's own files, else in a library that they use, if any."""
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
