"""A session that the tests of a module share, where none of them harms it: a start saved each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_nvml import fake_nvml, nvml_library_path

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.errors import ActorNotFound
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.session import Session
from umbra.runtime.testing.factories import SessionFactory

__all__ = ["fake_nvml", "nvml_library_path", "session", "shared", "socket_root", "spawn"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionFactory]:
    """Its first session is open and stays so; `notes` are those of all tests so far."""
    folder = tmp_path_factory.mktemp("shared")
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        SessionFactory(folder, monkeypatch) as factory,
    ):
        factory()
        yield factory


@pytest.fixture
def session(shared: SessionFactory) -> Session:
    """The shared session. A test must leave it working."""
    return shared.sessions[0]


@pytest.fixture
def spawn(session: Session) -> Iterator[Callable[[ActorSpec], SyncHandle]]:
    """Starts actors in the shared session; they are stopped after the test."""
    names: list[str] = []

    def start(spec: ActorSpec) -> SyncHandle:
        names.append(spec.name)
        return session.spawn(spec)

    yield start
    for name in names:
        with contextlib.suppress(ActorNotFound):
            session.stop(name)


@pytest.fixture
def socket_root() -> Iterator[Path]:
    """For UMBRA_SOCKET_ROOT of a process that a test starts; pytest's folders are too deep."""
    with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as folder:
        yield Path(folder) / "s"
