"""Hosts, and a place for a job's files."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from network import Hosts


@pytest.fixture(scope="session")
def hosts() -> Generator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Where the job's keys, sockets and files are: a folder with a short name, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="umbra-") as name:
        for variable in ("HOME", "UMBRA_SOCKET_ROOT"):
            folder = Path(name, variable.lower())
            folder.mkdir(mode=0o700)
            monkeypatch.setenv(variable, str(folder))
        yield Path(name)
