from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from umbra.runtime.errors import ConfigError


def load_target(target: str) -> type:
    """Imports `module:Class`. Raises ConfigError that names the cause."""
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"actor target {target!r} must be written module:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot import {module_name!r} for actor target {target!r}: {error}. "
            "Install it, or put its folder on PYTHONPATH or in the spec's sys_path."
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{module_name} ({module.__file__}) has no class {class_name!r}")
    return found


def make_target(
    target: str, kwargs: Mapping[str, Any], kwarg_settings: Mapping[str, str] | None = None
) -> Any:
    """An instance of `module:Class`. Raises ConfigError that lists the accepted arguments, by their
    `kwarg_settings`."""
    kind = load_target(target)
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a class without a signature, such as one written in C
        return kind(**kwargs)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        settings = (kwarg_settings or {}).items()
        setting = next((f"{text}: " for name, text in settings if repr(name) in str(error)), "")
        raise ConfigError(
            f"{setting}{target}: {error}; it takes {', '.join(signature.parameters)}"
        ) from None
    return kind(**kwargs)
