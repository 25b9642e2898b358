"""The ranges of versions that umbra was tested with."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from umbra.runtime.package_versions import outside_tested_range


def test_installed_packages_are_within_the_tested_ranges() -> None:
    installed = {package: version(package) for package in ("torch", "transformers", "pyzmq")}

    warnings = {package: outside_tested_range(package, installed[package]) for package in installed}

    assert not any(warnings.values()), warnings


@pytest.mark.parametrize("inside", ["0.26.0", "0.33.0", "0.33.0+cpu", "0.33.1rc1"])
def test_versions_within_the_range_are_not_mentioned(inside: str) -> None:
    assert outside_tested_range("vllm", inside) == ""


@pytest.mark.parametrize("outside", ["0.25.1", "0.34.0", "dev"])
def test_a_version_outside_the_range_is_named_with_the_range(outside: str) -> None:
    assert outside_tested_range("vllm", outside) == (
        f"vllm {outside} is outside the tested range <0.34,>=0.26"
    )


def test_a_package_without_a_range_is_not_judged() -> None:
    assert outside_tested_range("numpydoc", "1.0") == ""
