"""Which packages are there, and the ranges of versions that umbra was tested with."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from umbra.engines.shell.adapter_settings import load_library
from umbra.runtime.errors import ConfigError
from umbra.runtime.package_versions import is_installed, outside_tested_range


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


def test_a_folder_of_logs_or_a_clone_is_no_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "umbra_test_engine/umbra_test_engine").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    assert is_installed("pytest")
    assert not is_installed("umbra_test_engine")
    with pytest.raises(ConfigError, match="needs Engine, which is not installed here: pip install"):
        load_library("Engine", "umbra_test_engine", str, missing="pip install it")
