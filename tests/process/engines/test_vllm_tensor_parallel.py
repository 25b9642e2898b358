"""vLLM on the CPU in two workers, each of which has its slices of the weights and of an adapter."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_factory import save_adapter
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_suite import MakeEngine
from engine_runs import on_the_engines_loop, running
from local_sync import publish
from lora_runs import check_each
from model_factory import make_model
from process_runs import actor_of, assert_ended, greedy, tree_of
from test_vllm_process import NEVER, START_TIMEOUT_S, core_of, hang, vllm_spec
from vllm_runs import needs_vllm, running_core

from umbra.engines.vllm.vllm_engine import VllmCore
from umbra.runtime.errors import EngineError
from umbra.runtime.process import descendants
from umbra.runtime.session.session import Session
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.manifest import Manifest

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
TWO_WORKERS = {"tensor_parallel_size": 2}


@pytest.fixture(scope="session", params=["qwen3"])
def model_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def adapters(model_kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {"all": save_adapter(folder, model_kind, seed=1)}


@pytest.fixture(scope="module")
def core(
    model_kind: str, model_folder: Callable[[str], Path], adapters: dict[str, Path]
) -> Generator[VllmCore]:
    with running_core(model_folder(model_kind), adapters, engine_args=TWO_WORKERS) as core:
        yield core


def test_a_killed_worker_takes_the_engine_and_the_other_one_along(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    spec = vllm_spec(model_folder("qwen3"), NEVER, engine_args=TWO_WORKERS)
    engine = umbra_session.spawn(replace(spec, start_timeout_s=2 * START_TIMEOUT_S))
    assert len(greedy(engine)) == 20
    tree = tree_of(actor_of(umbra_session, "vllm")["pid"])
    first, second = descendants.working_child_pids(core_of(tree[0]))
    hang(first)  # vLLM waits four seconds for its end, and as long again, before it says anything

    began = time.monotonic()
    os.kill(second, signal.SIGKILL)

    assert_ended(tree)  # /dev/shm is looked at, too
    assert time.monotonic() - began < 4.0
    os.waitpid(first, 0)  # whom it holds nobody else can reap


@on_the_engines_loop
async def test_two_workers_have_the_logprobs_of_the_whole_model_through_updates(
    make_engine: MakeEngine, model_kind: str, adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine()
    async with running(engine):
        await check_each(engine, model_kind, 0, adapters)
        for version in (1, 2):
            await engine.pause("abort")
            weights = dict(make_model(model_kind, version).named_parameters())
            await publish(engine, weights, version, tmp_path)
            await check_each(engine, model_kind, version, adapters)


@on_the_engines_loop
async def test_workers_that_cannot_open_an_update_leave_the_engine_as_it_was(
    make_engine: MakeEngine,
    core: VllmCore,
    model_kind: str,
    adapters: dict[str, Path],
    tmp_path: Path,
) -> None:
    """A sync that is aborted while the engine generates takes its control block away."""
    description: dict[str, Any] = {
        "manifest": Manifest.layout([]).to_wire(),
        "exports": [],
        "progress": {"name": "gone", "num_ranks": 1, "num_engines": 1, "engine": 0, "timeout_s": 9},
        "has_checksums": False,
        "is_staged": False,
    }

    engine = make_engine()
    async with running(engine), serve_fds(str(tmp_path / "none")) as server:
        weights = dict(make_model(model_kind, 1).named_parameters())
        await publish(engine, weights, 1, tmp_path)
        weights = description | {"fd_socket": server.socket_path}
        with pytest.raises(EngineError, match="gone"):
            await core.ask_workers({"action": "open", "weights": weights})
        assert not core.died.is_set()
        await core.ask_workers({"action": "close"})
        await check_each(engine, model_kind, 1, adapters)
