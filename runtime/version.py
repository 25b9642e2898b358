"""Which umbra this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def umbra_version() -> str:
    """As it is installed; "(not installed)" where it runs from its sources alone."""
    try:
        return version("umbra-rl")
    except PackageNotFoundError:
        return "(not installed)"
