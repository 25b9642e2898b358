"""A disk that is slower than the engines holds up admission, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from async_tests import on_a_loop
from ledger_replay import replay
from recorded_checks import check_accounts
from recorded_story import Story
from recorded_world import Engine, Life, finish_all
from rollout_configs import rollout_config

from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.router import EngineId
from umbra.runtime.rollout.dispatch.token_store import Runs
from umbra.runtime.rollout.dispatch.trajectory import Group, Trajectory
from umbra.runtime.rollout.ledger import recorder
from umbra.runtime.rollout.ledger.ledger_events import Restored
from umbra.runtime.rollout.ledger.ledger_history import read_history
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.prompts import Prompt

CONFIG = rollout_config(stop_token_ids=(0,), max_staleness=1)
MAX_QUEUED_NBYTES = 3000
A = EngineId("a", 1)


class Disk:
    """The disk of a ledger whose bound is small; syncs wait while it is held."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._real_sync = os.fsync
        self._is_free = threading.Event()
        self._is_free.set()
        self.hold, self.release = self._is_free.clear, self._is_free.set
        patch.setattr(os, "fsync", self._sync)

    def _sync(self, descriptor: int) -> None:
        assert self._is_free.wait(30)
        self._real_sync(descriptor)


def set_bound(patch: pytest.MonkeyPatch, max_queued_nbytes: int, stall_timeout_s: float) -> None:
    changed = partial(
        LedgerWriter,
        flush_s=0.0,
        max_queued_nbytes=max_queued_nbytes,
        stall_timeout_s=stall_timeout_s,
    )
    patch.setattr(recorder, "LedgerWriter", changed)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    set_bound(monkeypatch, MAX_QUEUED_NBYTES, stall_timeout_s=30.0)
    return Disk(monkeypatch)


@asynccontextmanager
async def living(folder: Path, disk: Disk) -> AsyncGenerator[tuple[Life, Engine]]:
    """A manager with one engine, which asks for nothing yet."""
    life, engine = Life(folder, CONFIG), Engine(A, 1)
    await life.recorder.__aenter__()
    try:
        await life.recover(Restored(0, 0), "")
        life.learn(1, 0)
        await life.recorder.durable()
        life.dispatcher.attach(A, engine)
        life.dispatcher.set_serving(A, True)
        yield life, engine
    finally:
        disk.release()
        await life.end()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - waiting must not wake the manager
            await asyncio.sleep(0.001)


def fill(life: Life, nbytes: int) -> None:
    """Records a value, like a tool's answer in `ctx.once`."""
    life.recorder.value_kept(life.groups[0].trajectories[0], "page", b"x" * nbytes)


@on_a_loop
async def test_admission_waits_for_the_disk_and_resumes_by_itself(
    tmp_path: Path, disk: Disk
) -> None:
    async with living(tmp_path, disk) as (life, engine):
        life.flow.advance(0)
        assert life.flow.num_admitted == 4
        disk.hold()
        fill(life, MAX_QUEUED_NBYTES)
        await finish_all(life, engine)
        assert life.flow.progress()["groups_ready"] == 4  # open groups are not held up
        assert life.flow.take(0) is not None
        life.learn(2, 1)
        life.flow.advance(1)

        await asyncio.sleep(0.05)

        assert not life.recorder.has_capacity
        assert life.flow.num_admitted == 4
        assert life.flow.metrics([])["ledger_queued_mib"] > MAX_QUEUED_NBYTES / 2**20
        disk.release()
        await until(lambda: life.flow.num_admitted == 6)
        await finish_all(life, engine)
        await life.recorder.durable()
        check_accounts(replay(read_history(tmp_path).entries), life)
        assert life.failures == []


def test_what_is_recorded_in_one_iteration_may_be_more_than_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = "umbra.runtime.rollout.ledger.ledger_events"
    monkeypatch.setattr(f"{events}.BATCH_MAX_NBYTES", 1000)
    monkeypatch.setattr(f"{events}._EVENT_MAX_TOKENS", 50)
    prompt = Prompt("p", "", np.ones(4, np.int32), {})
    samples = [
        Trajectory(f"e0/p/{idx}", prompt, idx, budget=8, max_context_len=1000) for idx in range(8)
    ]

    async def body() -> None:
        failures: list[UmbraError] = []
        async with Recorder(tmp_path, failures.append) as recorder:
            recorder.admitted(Group("e0/p", samples), 0, 0)
            for sample in samples:
                recorder.prompt_replaced(sample, np.full(200, sample.uid, np.int32))
                recorder.value_kept(sample, "page", bytes([sample.uid]) * 900)
            uids, zeros = np.arange(8), np.zeros(8, np.int64)
            tokens = np.arange(1600, dtype=np.int32)
            offsets = np.arange(0, 1601, 200)
            logprobs = tokens.astype(np.float32)
            recorder.on_tokens(Runs(uids, zeros, offsets, zeros - 1, tokens, logprobs))
            await recorder.durable()
        assert failures == []

    asyncio.run(body())
    state = replay(read_history(tmp_path).entries)
    for sample in samples:
        account = state.sample(sample.uid)
        assert account.prompt is not None
        assert account.prompt.tolist() == [sample.uid] * 200
        assert account.recorded == {"page": bytes([sample.uid]) * 900}
        assert account.tokens.tolist() == [*range(200 * sample.uid, 200 * sample.uid + 200)]


@on_a_loop
async def test_under_the_bound_admission_does_not_wait(tmp_path: Path, disk: Disk) -> None:
    async with living(tmp_path, disk) as (life, _):
        disk.hold()
        life.flow.advance(0)
        await asyncio.sleep(0)
        assert 0 < life.recorder.queued_nbytes < MAX_QUEUED_NBYTES
        assert life.flow.num_admitted == 4


@on_a_loop
async def test_a_disk_that_is_full_fails_the_job_where_nobody_appends(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    async with living(tmp_path, disk) as (life, _):
        life.flow.advance(0)
        await life.recorder.durable()
        monkeypatch.setattr(os, "writev", full)
        fill(life, MAX_QUEUED_NBYTES)
        await until(lambda: bool(life.failures))
        assert "the disk is full" in str(life.failures)


@on_a_loop
async def test_an_abandoned_flow_admits_nothing_when_there_is_capacity(
    tmp_path: Path, disk: Disk
) -> None:
    async with living(tmp_path, disk) as (life, engine):
        life.flow.advance(0)
        disk.hold()
        fill(life, MAX_QUEUED_NBYTES)
        await finish_all(life, engine)
        assert life.flow.take(0) is not None
        life.flow.advance(1)
        life.flow.abandon()
        disk.release()
        await until(lambda: life.recorder.queued_nbytes == 0)
        assert life.flow.num_admitted == 4


@pytest.mark.slow
def test_whatever_happens_meanwhile_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_held = 0
    on_capacity = Recorder.on_capacity

    def count(self: Recorder, resume: Callable[[], None]) -> None:
        nonlocal num_held
        num_held += 1
        on_capacity(self, resume)

    def slow_sync(_descriptor: int) -> None:
        time.sleep(0.005)

    monkeypatch.setattr(Recorder, "on_capacity", count)
    monkeypatch.setattr(os, "fsync", slow_sync)
    set_bound(monkeypatch, 1, stall_timeout_s=30.0)

    async def live(story: Story) -> None:
        await story.begin()
        try:
            for number in range(300):
                await story.move()
                if number % 50 == 0:
                    await story.check()
            story.is_calm, goal = True, story.step + 2
            async with asyncio.timeout(30.0):
                while story.step < goal:
                    await story.move()
            await story.check()
        finally:
            await story.life.end()

    with asyncio.Runner() as runner:
        for seed in range(6):
            story = Story(seed, tmp_path / str(seed))
            try:
                runner.run(live(story))
            except BaseException:
                print(f"seed {seed}, {story.config}", *story.moves, sep="\n")
                raise
    assert num_held > 10
