"""Runs pools without a trainer, in a session of this process; engines load their models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session import Session, SessionConfig
from umbra.trainer.reporting.progress_display import ProgressDisplay
from umbra.trainer.services import starting_engines
from umbra.trainer.signals import StopRequested, StopSignals

_SHUTDOWN_GRACE_S: Final = 5.0
"""Time for engines and requests in progress to end."""
_STOP_GRACE_S: Final = 20.0
"""Time from a signal to the forced end of this process; longer than an orderly end takes."""


def with_pools(
    pools: Callable[[], Sequence[PoolSpec]],
    run_dir: Path,
    actors: Sequence[ActorSpec],
    work: Callable[[Session, ProgressDisplay], None],
) -> int:
    """Runs `work` while the pools' engines and the actors that use them serve.

    No process of them is left afterwards. Returns 0, or 128 + the signal's number if SIGINT or
    SIGTERM ended it.

    Raises:
        UmbraError: an error of `work`, or of the start of an actor or an engine. JobFailed if they
            cannot be kept running.
    """
    settings = SessionConfig(run_dir=run_dir, shutdown_grace_s=_SHUTDOWN_GRACE_S)
    with (
        ProgressDisplay(sys.stderr) as display,
        StopSignals(_STOP_GRACE_S) as signals,
        # Blocked calls of the session raise the failure, and `work` always is in one.
        Session.from_torchrun(
            settings, on_note=display.note, on_failed=lambda _: None, on_signal=signals.pass_in
        ) as session,
    ):
        signals.defer(session.pass_on_signal)
        try:
            with signals.interruptible():
                _start(session, display, pools(), actors)
                work(session, display)
        except StopRequested:
            pass
    return signals.exit_status


def _start(
    session: Session,
    display: ProgressDisplay,
    pools: Sequence[PoolSpec],
    actors: Sequence[ActorSpec],
) -> None:
    """Starts pools and actors at the same time, so that the actors' errors come early.

    Pools that share memory wait for each other in the supervisor.
    """

    def create(pool: PoolSpec, others_s: float) -> None:
        with starting_engines(display, session, pool):
            session.create_pool(pool, others_s=others_s)

    all_s = sum(pool.start_timeout_s for pool in pools)
    executor = ThreadPoolExecutor(len(pools), "umbra-start")
    try:
        engines = [
            executor.submit(create, pool, others_s=all_s - pool.start_timeout_s) for pool in pools
        ]
        for actor in actors:
            session.spawn(actor)
        for started in as_completed(engines):
            started.result()
    finally:
        executor.shutdown(wait=False)  # after an error, the session ends the starts in progress
