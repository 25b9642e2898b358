"""The SGLang adapter over a stand-in for SGLang: the conformance suite, without a GPU."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import sglang_failing
import torch
from adapter_fixtures import *  # noqa: F403 - the fixtures
from conformance_runs import VOCAB_SIZE, MakeEngine, requests, results_of, weights
from conformance_suite import *  # noqa: F403 - the tests
from engine_runs import Collector, on_the_engines_loop, running
from local_sync import publish
from model_factory import make_model
from sglang_stand_in import LATER_VERSION, Frontend, stand_in_core, stand_in_modules
from torch import Tensor

from umbra.engines.sglang import sglang_worker
from umbra.engines.sglang.sglang_engine import SglangCore, SglangEngine
from umbra.engines.sglang.sglang_requests import stream_interval
from umbra.runtime.actor.actor_spec import ActorSpec, RestartPolicy
from umbra.runtime.errors import ActorDied, EngineError
from umbra.runtime.process import descendants
from umbra.runtime.session.session import Session


@pytest.fixture(scope="module")
def stand_in() -> Generator[None]:
    with stand_in_modules(lambda: make_model("qwen3").double(), VOCAB_SIZE, LATER_VERSION):
        yield


@pytest.fixture(scope="module", params=["sglang"])
def core(stand_in: None, model_folder: Callable[[str], Path]) -> Generator[SglangCore]:
    with stand_in_core(model_folder("qwen3")) as core:
        yield core


def frontend_of(core: SglangCore) -> Frontend:
    return core._frontend  # pyright: ignore[reportPrivateUsage]


@on_the_engines_loop
async def test_tokens_wake_nobody_but_at_both_ends_of_a_request(
    make_engine: MakeEngine, core: SglangCore
) -> None:
    before = frontend_of(core).num_wakes
    engine = make_engine()
    async with running(engine):
        await results_of(engine, requests(10, max_new_tokens=50))
    assert frontend_of(core).num_wakes - before <= 30


def with_unknown(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"model.layers.1.unknown.weight": torch.ones(3)}


def without_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if name != "model.norm.weight"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_unknown, "model lacks 1 of the trainer's weights: model.layers.1.unknown"),
        (without_norm, "do not fill 1 of SGLang's parameters: model.norm.weight"),
    ],
)
@on_the_engines_loop
async def test_weights_that_do_not_fit_fail_the_update_and_not_the_engine(
    make_engine: MakeEngine,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    text: str,
) -> None:
    engine = make_engine()
    async with running(engine):
        tensors = change(weights("qwen3", 1))
        assert text in await failure_of(publish(engine, tensors, 1, tmp_path))
        with pytest.raises(EngineError, match="PENDING_WEIGHTS"):
            await engine.submit(requests(1))
        await publish(engine, weights("qwen3", 2), 2, tmp_path)
        assert (await results_of(engine, requests(1)))[0].versions == [2] * 8


async def failure_of(publishing: Coroutine[Any, Any, object]) -> str:
    try:
        await publishing
    except ExceptionGroup as group:
        return str(group.exceptions[0])
    raise AssertionError("it was taken")


def assert_holds(core: SglangCore, seed: int) -> None:
    model = frontend_of(core).model
    held = dict(model.named_parameters())
    for name, tensor in weights("qwen3", seed).items():
        assert torch.equal(held[name], tensor), name
    assert torch.equal(model.made_of_weights, model.make())


@on_the_engines_loop
async def test_an_update_and_both_sleeps_leave_the_model_with_the_right_weights(
    make_engine: MakeEngine, core: SglangCore, tmp_path: Path
) -> None:
    engine = make_engine()
    async with running(engine):
        assert_holds(core, 0)
        await publish(engine, weights("qwen3", 1), 1, tmp_path)
        assert_holds(core, 1)
        await engine.pause("abort")
        await engine.sleep(1)
        assert frontend_of(core).released == {"weights", "kv_cache"}
        await engine.wake(["weights"])
        assert_holds(core, 1)
        assert frontend_of(core).released == {"kv_cache"}
        await engine.wake(["kv_cache"])
        await engine.sleep(2)
        await publish(engine, weights("qwen3", 2), 2, tmp_path)
        assert_holds(core, 2)
        for version, part in ((3, "kv_cache"), (4, "weights")):
            await engine.pause("abort")
            for _ in range(2):
                await engine.sleep(2, [part])  # pyright: ignore[reportArgumentType]
                assert frontend_of(core).released == {part}
            await publish(engine, weights("qwen3", version), version, tmp_path)
            assert_holds(core, version)
            assert not frontend_of(core).released


@on_the_engines_loop
async def test_weights_asleep_are_not_saved_again_when_the_kv_cache_sleeps_again(
    make_engine: MakeEngine, core: SglangCore
) -> None:
    engine = make_engine()
    async with running(engine):
        await engine.pause("abort")
        await engine.sleep(1)
        await engine.wake(["kv_cache"])
        await engine.sleep(1)
        await engine.wake(["weights", "kv_cache"])
        assert_holds(core, 0)


@on_the_engines_loop
async def test_tokens_that_may_have_been_on_their_way_count_as_made_by_the_older_weights(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    collector = Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        await engine.submit(requests(1, max_new_tokens=100))
        while not collector[0].tokens:
            collector.apply(await anext(batches))
        await engine.pause("keep")
        num_before = (await engine.stats())["tokens_total"]
        await publish(engine, weights("qwen3", 1), 1, tmp_path)
        while not collector.num_finished():
            collector.apply(await anext(batches))
    assert collector[0].versions.count(0) == num_before + stream_interval(1)


@on_the_engines_loop
async def test_what_is_frozen_ends_before_a_sleep_with_the_tokens_it_had(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    collector = Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        await engine.submit(requests(3, max_new_tokens=400))
        while not collector[2].tokens:
            collector.apply(await anext(batches))
        await engine.pause("keep")
        num_tokens = (await engine.stats())["tokens_total"]
        await engine.sleep(2)
        while collector.num_finished() < 3:
            collector.apply(await anext(batches))
        assert (await engine.stats())["tokens_total"] == num_tokens
    assert {c.reason for c in collector.completions.values()} == {"abort"}


@pytest.mark.parametrize("frozen", [False, True])
@on_the_engines_loop
async def test_an_engine_at_work_is_asked_what_it_can_import_and_continues(
    make_engine: MakeEngine, core: SglangCore, frozen: bool
) -> None:
    engine = make_engine()
    collector = Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        await engine.submit(requests(3, max_new_tokens=200))
        while not collector[2].tokens:
            collector.apply(await anext(batches))
        if frozen:
            await engine.pause("keep")
        assert "not on a GPU" in await engine.probe_import([])
        assert frontend_of(core).is_pause == frozen
        await engine.resume()
        while collector.num_finished() < 3:
            collector.apply(await anext(batches))
    assert [len(collector[i].tokens) for i in range(3)] == [200] * 3


@on_the_engines_loop
async def test_an_engine_that_cannot_be_asked_goes_on(
    make_engine: MakeEngine, core: SglangCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    collector = Collector()
    async with running(engine), aclosing(engine.deltas()) as batches:
        await engine.submit(requests(1, max_new_tokens=200))
        while not collector[0].tokens:
            collector.apply(await anext(batches))
        monkeypatch.delitem(sglang_worker._ACTIONS, "settle")  # pyright: ignore
        with pytest.raises(EngineError, match="settle"):
            await engine.probe_import([])
        assert not frontend_of(core).is_pause


@pytest.mark.process
def test_the_engine_fails_when_a_process_of_sglang_ends(
    stand_in: None, model_folder: Callable[[str], Path]
) -> None:
    async def body() -> None:
        engine = SglangEngine(
            model_path=str(model_folder("qwen3")), dtype="float32", max_context_len=512
        )
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT)
        async with engine:
            core = engine._core  # pyright: ignore[reportPrivateUsage]
            assert isinstance(core, SglangCore)
            (scheduler,) = core._children  # pyright: ignore[reportPrivateUsage]
            os.kill(scheduler, signal.SIGKILL)
            with pytest.raises(EngineError, match="a process of SGLang has ended"):
                await engine.run()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT)) == before

    asyncio.run(body())


@pytest.mark.process
def test_the_engine_fails_when_a_process_of_sglang_reports_a_failure_and_does_not_end(
    stand_in: None, model_folder: Callable[[str], Path]
) -> None:
    """Sends SIGQUIT, and ends when its threads let it, like run_scheduler_process."""

    async def body() -> None:
        engine = SglangEngine(
            model_path=str(model_folder("qwen3")), dtype="float32", max_context_len=512
        )
        before = signal.getsignal(signal.SIGQUIT)
        async with engine, asyncio.timeout(10):
            os.kill(os.getpid(), signal.SIGQUIT)
            with pytest.raises(EngineError, match="a process of SGLang has ended"):
                await engine.run()
        assert signal.getsignal(signal.SIGQUIT) == before

    asyncio.run(body())


@pytest.fixture
def settings(stand_in: None, model_folder: Callable[[str], Path]) -> dict[str, Any]:
    return {"model_path": str(model_folder("qwen3")), "dtype": "float32", "max_context_len": 512}


def test_requests_that_run_at_the_stop_end_before_the_sockets_are_closed(
    settings: dict[str, Any],
) -> None:
    async def body() -> None:
        engine = SglangEngine(**settings, load_weights=True)
        async with engine:
            frontend = frontend_of(engine._core)  # pyright: ignore
            await engine.submit(requests(4, max_new_tokens=400))
        assert frontend.send_to_scheduler.is_closed
        assert frontend.send_to_scheduler.num_too_late == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())


class Failing:
    """An Engine whose scheduler fails at its start."""

    def __init__(self, **_kwargs: Any) -> None:
        atexit.register(self.shutdown)
        os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        raise RuntimeError("Initialization failed. Please see the error messages above.")

    def shutdown(self) -> None:
        raise AssertionError("it would end all children of this process")


@pytest.mark.process
def test_a_start_that_fails_half_way_leaves_nothing_in_this_process(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["sglang.srt.entrypoints.engine"], "Engine", Failing)
    before = signal.getsignal(signal.SIGQUIT), descendants.child_pids(os.getpid())
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)

    async def body() -> None:
        with pytest.raises(EngineError, match="did not start: Initialization failed"):
            async with SglangEngine(**settings):
                pass

    asyncio.run(body())

    assert (signal.getsignal(signal.SIGQUIT), descendants.child_pids(os.getpid())) == before
    assert not at_exit


@pytest.mark.process
def test_a_scheduler_that_ends_at_the_first_token_fails_the_start(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = descendants.child_pids(os.getpid())

    async def kill_scheduler(frontend: Frontend, asked: Any) -> AsyncGenerator[dict[str, Any]]:
        for pid in set(descendants.child_pids(os.getpid())) - set(others):
            os.kill(pid, signal.SIGKILL)
        await asyncio.Event().wait()
        yield {}

    monkeypatch.setattr(Frontend, "generate_request", kill_scheduler)

    async def body() -> None:
        with pytest.raises(EngineError, match="a process of SGLang ended at its first request"):
            async with SglangEngine(**settings):
                pass

    asyncio.run(body())


def test_what_is_no_token_fails_the_start(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(frontend: Frontend, asked: Any) -> AsyncGenerator[dict[str, Any]]:
        raise RuntimeError("no kernel image")
        yield {}

    monkeypatch.setattr(Frontend, "generate_request", fail)

    async def body() -> None:
        with pytest.raises(EngineError, match="no kernel image"):
            async with SglangEngine(**settings):
                pass

    asyncio.run(body())


@pytest.mark.process
@pytest.mark.slow
def test_a_failed_start_reports_the_errors_of_sglangs_processes(
    umbra_session: Session, model_folder: Callable[[str], Path]
) -> None:
    spec = ActorSpec(
        name="sglang",
        target="sglang_failing:FailingSglang",
        kwargs={
            "model_path": str(model_folder("qwen3")),
            "dtype": "float32",
            "max_context_len": 512,
        },
        sys_path=(str(Path(sglang_failing.__file__).parent),),
        restart=RestartPolicy(mode="never"),
        essential=False,
        role="engine",
    )

    with pytest.raises(ActorDied, match=r"SGLang 0\.5\.17 did not start: Rank 0") as caught:
        umbra_session.spawn(spec)

    _, _, quoted = str(caught.value).partition("the first error in ")
    place, *lines = quoted.splitlines()
    assert place.endswith("sglang.log:")
    assert lines[-2] == '  File "<string>", line 5, in <module>'
    assert lines[-1].startswith("RuntimeError: Not enough memory")
