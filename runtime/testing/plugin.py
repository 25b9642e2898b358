"""pytest plugin: supervised sessions, engines, an n-rank world, and a check for leaks.

It comes with umbra (entry point `pytest11`). It changes nothing in a project that does not use it:
it imports nothing heavy, all its names begin with `umbra_`, and a fixture runs only in a test that
asks for it. The check that tests leave nothing behind is off by default:

    [tool.pytest.ini_options]
    umbra_check_leaks = true

| fixture | gives |
|---|---|
| `umbra_session` | a `Session`, rank 0 of 1, with its own supervisor |
| `umbra_session_factory` | the same with options, and several of them |
| `umbra_tiny_model_dir` | a Qwen3 model directory of 100 k parameters, with a tokenizer |
| `umbra_embedded_engine` | embedded engines serving a model directory |
| `umbra_distributed_world` | runs a function in n processes with `torch.distributed` initialised |

`@pytest.mark.umbra_allow_leaks("why")` exempts one test from the check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from umbra.runtime.session.session import Session
    from umbra.runtime.testing.distributed_world import DistributedWorld
    from umbra.runtime.testing.factories import EngineFactory, SessionFactory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "umbra_check_leaks",
        "fail a test that leaves a process, descriptor, thread or shared memory behind",
        type="bool",
        default=False,
    )
    # A shorter grace blames correct tests on a busy machine; a longer one delays reports of leaks.
    parser.addini(
        "umbra_leak_grace_s",
        "longest wait, in seconds, for leftovers of a test to end by themselves",
        default="2.0",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "umbra_allow_leaks(reason): not checked for leaks (umbra_check_leaks), and why"
    )
    if config.getini("umbra_check_leaks"):
        if sys.platform != "linux":
            raise pytest.UsageError("umbra_check_leaks reads /proc, so it needs Linux")
        from umbra.runtime.testing import leak_check

        leak_check.prepare()
        config.pluginmanager.register(_LeakFixture(), "umbra_check_leaks")


class _LeakFixture:
    """A plugin of its own, so that only projects with `umbra_check_leaks` have the fixture."""

    @pytest.fixture(autouse=True)
    def umbra_no_leaks(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Fails a test that leaves something behind; see `umbra.runtime.testing.leak_check`."""
        marker = request.node.get_closest_marker("umbra_allow_leaks")
        if marker is not None:
            if not (marker.args or marker.kwargs.get("reason")):
                raise pytest.UsageError(
                    'umbra_allow_leaks needs a reason: @pytest.mark.umbra_allow_leaks("why")'
                )
            yield
            return
        from umbra.runtime.testing.leak_check import LeakCheck

        check = LeakCheck()
        yield
        leaks = check.finish(float(request.config.getini("umbra_leak_grace_s")))
        if leaks:
            listing = "\n".join(f"  {leak}" for leak in leaks)
            pytest.fail(f"the test left behind:\n{listing}", pytrace=False)


@pytest.fixture
def umbra_session_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SessionFactory]:
    """Opens sessions with options: `umbra_session_factory(tcp_host="127.0.0.1")`. They are closed
    in reverse order after the test, which then fails if a supervisor still runs or a socket
    directory was left."""
    from umbra.runtime.testing.factories import SessionFactory

    with SessionFactory(tmp_path, monkeypatch) as factory:
        yield factory


@pytest.fixture
def umbra_session(umbra_session_factory: SessionFactory) -> Session:
    """An open `Session`, rank 0 of 1, on a supervisor of its own."""
    return umbra_session_factory()


@pytest.fixture(scope="session")
def umbra_tiny_model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Hugging Face directory of a tiny Qwen3, always the same; skips without transformers. Kept
    in pytest's cache, so that later runs need not import transformers."""
    from umbra.runtime.testing.factories import make_tiny_model

    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    parent = tmp_path_factory.mktemp("umbra") if cache is None else cache.mkdir("umbra-models")
    return make_tiny_model(parent)


@pytest.fixture
def umbra_embedded_engine(umbra_session: Session, umbra_tiny_model_dir: Path) -> EngineFactory:
    """Starts embedded engines: `engine = umbra_embedded_engine()`, then
    `engine.call("submit", ...)`."""
    from umbra.runtime.testing.factories import EngineFactory

    return EngineFactory(umbra_session, umbra_tiny_model_dir)


@pytest.fixture
def umbra_distributed_world(tmp_path: Path) -> DistributedWorld:
    """Runs a function in n processes: `umbra_distributed_world(train_step, num_ranks=2)`."""
    pytest.importorskip("torch")
    from umbra.runtime.testing.distributed_world import DistributedWorld

    return DistributedWorld(tmp_path)
