"""The decisions of a sync, event by event, and a run that carries them out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from async_tests import on_a_loop

from umbra.runtime.pools.sync_run import SyncRun
from umbra.runtime.pools.sync_state import (
    Aborted,
    Action,
    Ask,
    Close,
    CommitVersion,
    Discard,
    EngineCutOff,
    EngineDone,
    FailRanks,
    Grant,
    Opened,
    Phase,
    SyncState,
    SyncStep,
)
from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.sync_messages import SyncBegin, SyncEnd, SyncFilled

MANIFEST = Manifest.layout([("a", "float32", (4,))])
LOADED = {"nbytes": MANIFEST.payload_nbytes}


def begin(rank: int, world_size: int = 1) -> SyncBegin:
    return SyncBegin(
        pool="pool",
        version=3,
        rank=rank,
        world_size=world_size,
        manifest=MANIFEST.to_wire() if rank == 0 else None,
        offers={"cuda_ipc": "it has no GPU", "tcp": ""},
        node_id="here",
        deadline=0.0,
    )


def filled(checksum: int | None = 7, is_released: bool = True) -> SyncFilled:
    return SyncFilled(
        rank=0,
        sync_id="pool-1",
        regions=[(0, 16, checksum)],
        network_nbytes=0,
        is_released=is_released,
        deadline=0.0,
    )


def opened(engines: Sequence[str], *, connects: bool = False) -> SyncState:
    """A sync of one rank whose engines have been asked to prepare."""
    state = SyncState(3)
    state.observe(begin(0))
    state.observe(Opened(engines=engines, connects=connects))
    return state


def loaded(engines: Sequence[str], is_released: bool = True) -> SyncState:
    """All engines have loaded, and are asked to verify."""
    state = opened(engines)
    for engine in engines:
        state.observe(EngineDone(engine, SyncStep.PREPARE))
        state.observe(EngineDone(engine, SyncStep.LOAD, LOADED))
    state.observe(filled(is_released=is_released))
    assert state.phase == Phase.VERIFYING
    return state


def test_a_version_is_committed_when_every_engine_has_loaded_and_verified_it() -> None:
    state = opened(["a"])

    actions = [
        state.observe(event)
        for event in (
            EngineDone("a", SyncStep.PREPARE),
            filled(),
            EngineDone("a", SyncStep.LOAD, LOADED),
            EngineDone("a", SyncStep.VERIFY, []),
            EngineDone("a", SyncStep.COMMIT),
        )
    ]

    assert actions == [
        [Ask("a", SyncStep.LOAD)],
        [],
        [Grant(SyncFilled), Ask("a", SyncStep.VERIFY)],
        [CommitVersion(), Ask("a", SyncStep.COMMIT)],
        [Grant(SyncEnd), Close()],
    ]


def test_a_message_of_another_phase_fails_the_ranks_unless_it_is_too_late() -> None:
    state = SyncState(3)
    begins, opens, fills = messages = (begin(0), Opened(engines=["b"]), filled())

    for own, event in (  # the message of this phase, and the next event
        (begins, begins),
        (opens, Opened(engines=["a"])),
        (fills, EngineDone("a", SyncStep.PREPARE)),
        (fills, EngineDone("a", SyncStep.LOAD, LOADED)),
        (fills, fills),
        (None, EngineDone("a", SyncStep.VERIFY, [])),
        (None, EngineDone("a", SyncStep.COMMIT)),
    ):
        for message in messages:
            if message != own:
                actions = deepcopy(state).observe(message)
                if message == opens or state.phase >= Phase.COMMITTING:
                    assert not actions
                    continue
                assert isinstance(failed := actions[0], FailRanks)
                is_late = "already in progress" if message == begins else "in phase"
                assert is_late in failed.reason
        state.observe(event)

    assert state.phase == Phase.CLOSED


def test_ranks_that_are_connected_with_engines_begin_when_all_are_prepared() -> None:
    state = opened(["a", "b"], connects=True)

    assert state.observe(EngineDone("a", SyncStep.PREPARE)) == [Ask("a", SyncStep.LOAD)]
    asked = state.observe(EngineDone("b", SyncStep.PREPARE))
    assert asked == [Ask("b", SyncStep.LOAD), Grant(SyncBegin)]


def test_no_engine_commits_before_all_ranks_are_released() -> None:
    state = loaded(["a"], is_released=False)

    assert state.observe(EngineDone("a", SyncStep.VERIFY, [])) == []
    released = state.observe(SyncEnd(rank=0, sync_id="pool-1", deadline=0.0))
    assert released == [CommitVersion(), Ask("a", SyncStep.COMMIT)]


@pytest.mark.parametrize("answer", [None, {}, {"nbytes": 12}, {"nbytes": 17}, {"nbytes": "16"}])
def test_an_engine_that_has_not_loaded_all_bytes_is_discarded(answer: object) -> None:
    state = opened(["a", "b"])
    for engine in ("a", "b"):
        state.observe(EngineDone(engine, SyncStep.PREPARE))

    (discarded,) = state.observe(EngineDone("a", SyncStep.LOAD, answer))

    assert isinstance(discarded, Discard)
    assert state.live_engines == ["b"]


@pytest.mark.parametrize("answer", [["a: sent 0x1, arrived 0x2"], None, "wrong"])
def test_an_engine_whose_checksums_differ_does_not_commit(answer: object) -> None:
    state = loaded(["a", "b"])
    state.observe(EngineDone("b", SyncStep.VERIFY, []))

    actions = state.observe(EngineDone("a", SyncStep.VERIFY, answer))

    assert isinstance(actions[0], Discard)
    assert actions[1:] == [CommitVersion(), Ask("b", SyncStep.COMMIT)]


@pytest.mark.parametrize(
    "late", [EngineDone("a", SyncStep.PREPARE), EngineDone("a", SyncStep.LOAD, None)]
)
def test_a_step_that_ends_after_an_abort_changes_nothing(late: EngineDone) -> None:
    state = opened(["a"])
    assert state.observe(Aborted("rank 0 is lost")) == [
        FailRanks("rank 0 is lost"),
        Ask("a", SyncStep.REVERT),
    ]

    assert state.observe(late) == []
    assert state.observe(EngineDone("a", SyncStep.REVERT)) == [Close()]


def test_ranks_whose_replicas_differ_fail_the_sync() -> None:
    state = SyncState(3)
    for rank in (0, 1):
        state.observe(begin(rank, 2))
    state.observe(Opened(engines=["a"]))
    assert state.observe(filled(checksum=7)) == []

    failed, *_ = state.observe(replace(filled(checksum=8), rank=1))

    assert isinstance(failed, FailRanks)
    assert "rank 1 and another one have different values in bytes [0, 16)" in failed.reason


def test_a_rank_that_fills_twice_fails_the_sync() -> None:
    state = opened(["a"])
    assert state.observe(filled()) == []

    failed, *_ = state.observe(filled())

    assert failed == FailRanks("rank 0 filled its buckets twice or never joined")


def test_an_abort_after_the_commit_is_too_late() -> None:
    state = loaded(["a"])
    state.observe(EngineDone("a", SyncStep.VERIFY, []))

    assert state.observe(Aborted("rank 0 is lost")) == []
    assert state.observe(EngineDone("a", SyncStep.COMMIT)) == [Grant(SyncEnd), Close()]


def test_the_sync_ends_when_an_engine_that_was_cut_off_has_been_reverted() -> None:
    state = opened(["a", "b"])
    state.observe(EngineDone("b", SyncStep.PREPARE))

    assert state.observe(EngineCutOff("a", "its receiver is lost")) == [Ask("a", SyncStep.REVERT)]
    state.observe(EngineDone("b", SyncStep.LOAD, LOADED))
    state.observe(filled(checksum=None))
    ends: list[list[Action]] = [
        state.observe(EngineDone("b", SyncStep.COMMIT)),
        state.observe(EngineDone("a", SyncStep.REVERT)),
    ]

    assert ends == [[], [Grant(SyncEnd), Close()]]
    assert state.live_engines == ["b"]


def test_ranks_that_have_joined_are_listed_in_order() -> None:
    state = SyncState(3)

    for rank in (2, 0):
        state.observe(begin(rank, world_size=3))

    assert state.joined_ranks == [0, 2]


def test_ranks_of_different_jobs_do_not_join_one_sync() -> None:
    state = SyncState(3)
    state.observe(begin(0, world_size=2))

    (failed, closed) = state.observe(begin(1, world_size=3))

    assert isinstance(failed, FailRanks)
    assert closed == Close()


@on_a_loop
async def test_a_rank_that_is_cancelled_as_it_is_granted_aborts_the_sync() -> None:
    @asynccontextmanager
    async def cancel_rank(*_: object) -> AsyncGenerator[Any]:
        waiting.cancel()
        yield SimpleNamespace(engines={}, links=None, progress=SimpleNamespace(abort=list))

    host: Any = SimpleNamespace(pool="pool", pause_mode="", open_sync=cancel_rank)
    run = SyncRun("pool-1", 3, host)
    async with asyncio.timeout(30.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(run.run())
        await run.started.wait()
        waiting = tasks.create_task(run.wait(begin(0)))

    assert waiting.cancelled()
    assert run.failure == "rank 0 stopped waiting (SyncBegin)"
