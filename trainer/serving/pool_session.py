"""A pool without a trainer: a session of this process alone, whose engines load the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.session import Session, SessionConfig
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
    """Of a config file, or for a model directory. Raises ConfigError, also for a bad model."""
    path = Path(place)
    if path.is_dir():
        values = {"model": {"path": str(path)}}
        config = check_config(ServeConfig, values, place, overrides)
    else:
        config = read_config(ServeConfig, path, overrides)
    try:
        read_model_config(config.model.path)
    except DataError as error:
        raise ConfigError(str(error)) from error
    return config


def generator_settings(config: ServeConfig) -> dict[str, Any]:
    """`GeneratorConfig` as a dict."""
    return {
        "pool": POOL,
        "max_context_len": max_context_len(config),
        "max_inflight_per_engine": config.pool.max_num_seqs,
        "engine_timeout_s": config.pool.sync_timeout_s,
    }


def with_pool(config: ServeConfig, run_dir: Path, work: Callable[[Session], None]) -> int:
    """Does `work` while the pool's engines serve; nothing of them is left afterwards.

    Returns 0, or 128 and the signal's number where SIGINT or SIGTERM ended it.

    Raises:
        UmbraError: what `work` raises, and JobFailed where the engines cannot be kept up.
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
                spec = engine_pool_spec(config, _device_type(config), load_weights=True)
                session.create_pool(spec)
                work(session)
        except StopRequested:
            pass
    return 128 + int(signals.received) if signals.received is not None else 0


def _device_type(config: ServeConfig) -> str:
    if config.pool.device != "auto":
        return config.pool.device
    from umbra.trainer.world import pick_device  # loads torch, to look for a GPU

    return pick_device("auto" if config.train is None else config.train.device, 0).type
