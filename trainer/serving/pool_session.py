"""A pool without a trainer: a session of this process alone, whose engines load the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from umbra.runtime.actor import ActorSpec
from umbra.runtime.session import Session, SessionConfig, SyncHandle
from umbra.trainer.config import ServeConfig
from umbra.trainer.config_file import check_config, read_config
from umbra.trainer.notes import NoteBoard
from umbra.trainer.services import POOL, engine_pool_spec, max_context_len
from umbra.trainer.signals import StopRequested, StopSignals
from umbra.trainer.tokenizer import read_model_config

_SHUTDOWN_GRACE_S: Final = 5.0
"""For engines and what is under way to end."""
_STOP_GRACE_S: Final = 20.0
"""From a signal to the end of this process in any case: longer than an orderly end takes."""


def read_serve_config(place: str, overrides: Sequence[str]) -> ServeConfig:
    """Of a config file, or for a model directory.

    Raises:
        ConfigError, DataError: settings are wrong, or the model's.
    """
    path = Path(place)
    if path.is_dir():
        values = {"model": {"path": str(path)}}
        config = check_config(ServeConfig, values, place, overrides)
    else:
        config = read_config(ServeConfig, path, overrides)
    read_model_config(config.model.path)
    return config


def generator_settings(config: ServeConfig) -> dict[str, Any]:
    """`GeneratorConfig` as a dict."""
    return {
        "pool": POOL,
        "max_context_len": max_context_len(config),
        "max_inflight_per_engine": config.pool.max_num_seqs,
        "engine_timeout_s": config.pool.sync_timeout_s,
    }


def with_pool(
    config: ServeConfig, run_dir: Path, spec: ActorSpec, work: Callable[[Session, SyncHandle], None]
) -> int:
    """Does `work` while the pool's engines and an actor in front of them serve.

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
        Session.from_torchrun(settings, on_note=notes.put, on_failed=lambda _: None) as session,
    ):
        signals.defer()
        try:
            with signals.interruptible():
                work(session, _start(session, config, spec))
        except StopRequested:
            pass
    return 128 + int(signals.received) if signals.received is not None else 0


def _start(session: Session, config: ServeConfig, spec: ActorSpec) -> SyncHandle:
    """Pool and actor at the same time: what the actor finds wrong is said before engines are up."""
    pool = engine_pool_spec(config, _device_type(config), load_weights=True)
    executor = ThreadPoolExecutor(1, "umbra-start")
    try:
        engines = executor.submit(session.create_pool, pool)
        handle = session.spawn(spec)
        engines.result()
    finally:
        executor.shutdown(wait=False)  # where this fails, the session ends what it waits for
    return handle


def _device_type(config: ServeConfig) -> str:
    if config.pool.device != "auto":
        return config.pool.device
    from umbra.trainer.world import pick_device  # loads torch, to look for a GPU

    return pick_device("auto" if config.train is None else config.train.device, 0).type
