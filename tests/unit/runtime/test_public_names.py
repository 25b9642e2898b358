"""The names that programs import from the package itself."""

from __future__ import annotations

import pytest

import umbra.runtime


@pytest.mark.parametrize("name", umbra.runtime.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(umbra.runtime, name).__name__ == name
