"""Fixtures of the tests of calls between processes, which import them all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rpc_process import ActorProcess, short_folder


@pytest.fixture(scope="module")
def shared() -> Iterator[ActorProcess]:
    """One actor for the tests that leave it as it was but for its counts."""
    with short_folder() as folder, ActorProcess(Path(folder)) as actor:
        yield actor


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield Path(path)


@pytest.fixture
def actor(folder: Path) -> Iterator[ActorProcess]:
    """One actor for a test that breaks it, or counts."""
    with ActorProcess(folder) as started:
        yield started
