from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from umbra.runtime.errors import ConfigError
from umbra.runtime.package_versions import outside_tested_range

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def load_library(name: str, module: str, pick: Callable[[str], _T], *, missing: str) -> _T:
    """Imports a foreign engine and returns what `pick` makes of its version; warns if untested.
    Raises ConfigError with the remedy, `missing` if it is not installed."""
    try:
        library: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise ConfigError(f"{name} cannot be imported: {error}") from error
        raise ConfigError(
            f'engine = "{module}" needs {name}, which is not installed here: {missing}'
        ) from None
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported: {error}") from error
    version = str(library.__version__)
    try:
        picked = pick(version)
    except (ImportError, AttributeError) as error:
        advice = outside_tested_range(module, version) or "reinstall it"
        raise ConfigError(f"{name} {version} lacks what umbra needs: {error}; {advice}") from error
    if warning := outside_tested_range(module, version):
        logger.warning(warning)
    return picked
