"""pytest plugin: supervised sessions, engines, an n-rank world, and a check for leaks.

It comes with umbra (entry point `pytest11`) and costs a project nothing until a fixture is used,
because it imports nothing heavy. The check that tests leave nothing behind is off by default:

    [tool.pytest.ini_options]
    umbra_check_leaks = true

| fixture | gives |
|---|---|
| `umbra_session` | a `Session`, rank 0 of 1, with its own supervisor |
| `umbra_session_factory` | the same with options, and several of them |
| `tiny_model_dir` | a Qwen3 model directory of 100 k parameters, with a tokenizer |
| `embedded_engine` | embedded engines serving a model directory |
| `distributed_world` | runs a function in n processes with `torch.distributed` initialised |

`@pytest.mark.allow_leaks("why")` exempts one test from the check.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from umbra.runtime.session import Session
    from umbra.runtime.testing.distributed_world import DistributedWorld
    from umbra.runtime.testing.engine_factory import EngineFactory
    from umbra.runtime.testing.session_factory import SessionFactory


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
        "markers", "allow_leaks(reason): not checked for leaks (umbra_check_leaks), and why"
    )
    if config.getini("umbra_check_leaks"):
        if sys.platform != "linux":
            raise pytest.UsageError("umbra_check_leaks reads /proc, so it needs Linux")
        from umbra.runtime.testing import leak_check

        leak_check.prepare()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves something behind; see `umbra.runtime.testing.leak_check`."""
    marker = request.node.get_closest_marker("allow_leaks")
    if marker is not None and not (marker.args or marker.kwargs.get("reason")):
        raise pytest.UsageError('allow_leaks needs a reason: @pytest.mark.allow_leaks("why")')
    if marker is not None or not request.config.getini("umbra_check_leaks"):
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
    """Opens sessions with options: `umbra_session_factory(tcp_host="127.0.0.1")`.

    They are closed in reverse order after the test, which then fails if a supervisor still runs or
    a socket directory was left.
    """
    from umbra.runtime.testing.session_factory import SessionFactory

    with SessionFactory(tmp_path, monkeypatch) as factory:
        yield factory


@pytest.fixture
def umbra_session(umbra_session_factory: SessionFactory) -> Session:
    """An open `Session`, rank 0 of 1, on a supervisor of its own."""
    return umbra_session_factory()


@pytest.fixture(scope="session")
def tiny_model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A Hugging Face directory of a tiny Qwen3, always the same; skips without transformers.

    Kept in pytest's cache, so that later runs need not import transformers.
    """
    from umbra.runtime.testing.tiny_model import make_tiny_model

    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    parent = tmp_path_factory.mktemp("umbra") if cache is None else cache.mkdir("umbra-models")
    return make_tiny_model(parent)


@pytest.fixture
def embedded_engine(umbra_session: Session, tiny_model_dir: Path) -> EngineFactory:
    """Starts embedded engines: `engine = embedded_engine()`, then `engine.call("submit", ...)`."""
    from umbra.runtime.testing.engine_factory import EngineFactory

    return EngineFactory(umbra_session, tiny_model_dir)


@pytest.fixture
def distributed_world(tmp_path: Path) -> DistributedWorld:
    """Runs a function in n processes: `distributed_world(train_step, num_ranks=2)`."""
    pytest.importorskip("torch")
    from umbra.runtime.testing.distributed_world import DistributedWorld

    return DistributedWorld(tmp_path)
