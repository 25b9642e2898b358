"""Fixtures for the tests of weights."""

from __future__ import annotations

import pytest
from fake_ipc import FakeIpc


@pytest.fixture
def ipc() -> FakeIpc:
    return FakeIpc()
