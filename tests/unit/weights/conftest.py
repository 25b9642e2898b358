"""Fixtures for the tests of weights."""

from __future__ import annotations

import pytest
from fake_ipc import FakeIpc

from umbra.runtime.weights.transports.nccl.weight_links import open_store


@pytest.fixture(scope="session", autouse=True)
def pipe_of_stores() -> None:
    """The first store of a process makes a pipe that stays; no test is blamed for it."""
    open_store("127.0.0.1")


@pytest.fixture
def ipc() -> FakeIpc:
    return FakeIpc()
