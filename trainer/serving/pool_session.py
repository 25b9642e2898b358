"""Pools without a trainer: a session of this process alone, whose engines load their models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session import Session, SessionConfig
from umbra.trainer.reporting.note_board import NoteBoard
from umbra.trainer.signals import StopRequested, StopSignals

_SHUTDOWN_GRACE_S: Final = 5.0
"""For engines and what is under way to end."""
_STOP_GRACE_S: Final = 20.0
"""From a signal to the end of this process in any case: longer than an orderly end takes."""


def with_pools(
    pools: Callable[[], Sequence[PoolSpec]],
    run_dir: Path,
    spec: ActorSpec,
    work: Callable[[Session, SyncHandle], None],
) -> int:
    """Does `work` while the pools' engines and an actor in front of them serve.

    Nothing of them is left afterwards. Returns 0, or 128 and the signal's number where SIGINT or
    SIGTERM ended it.

    Raises:
        UmbraError: what `work` raises, what the actor or an engine raised when it started, and
            JobFailed where they cannot be kept up.
    """
    settings = SessionConfig(run_dir=run_dir, shutdown_grace_s=_SHUTDOWN_GRACE_S)
    notes = NoteBoard(is_shown=True)
    with (
        StopSignals(_STOP_GRACE_S) as signals,
        # whoever waits in a call of the session gets the failure, and `work` always does
        Session.from_torchrun(
            settings, on_note=notes.put, on_failed=lambda _: None, on_signal=signals.pass_in
        ) as session,
    ):
        signals.defer(session.pass_on_signal)
        try:
            with signals.interruptible():
                work(session, _start(session, pools(), spec))
        except StopRequested:
            pass
    return 128 + int(signals.received) if signals.received is not None else 0


def _start(session: Session, pools: Sequence[PoolSpec], spec: ActorSpec) -> SyncHandle:
    """Pools and actor at the same time: what the actor finds wrong is said before engines are up.

    Pools that share memory wait for each other in the supervisor.
    """
    all_s = sum(pool.start_timeout_s for pool in pools)
    executor = ThreadPoolExecutor(len(pools), "umbra-start")
    try:
        engines = [
            executor.submit(session.create_pool, pool, others_s=all_s - pool.start_timeout_s)
            for pool in pools
        ]
        handle = session.spawn(spec)
        for started in as_completed(engines):
            started.result()
    finally:
        executor.shutdown(wait=False)  # where this fails, the session ends what it waits for
    return handle
