from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session import Session


class EngineFactory:
    """Starts embedded engines in a session, each in a process that the session ends."""

    def __init__(self, session: Session, model_dir: Path) -> None:
        self._session = session
        self._model_dir = model_dir
        self._numbers = itertools.count()

    def __call__(
        self, model_dir: Path | None = None, *, name: str = "", **kwargs: Any
    ) -> SyncHandle:
        """Starts an engine with the weights of `model_dir` (default: the tiny model), on the CPU.
        `kwargs` are the engine's, such as `max_num_seqs`. For a pool, whose engines get their
        weights by a sync, use `session.create_pool`."""
        settings: dict[str, Any] = {
            "model_path": str(model_dir or self._model_dir),
            "max_context_len": 256,
            "max_num_seqs": 8,
            "tick_ms": 5.0,
            "load_weights": True,
            **kwargs,
        }
        spec = ActorSpec(
            name=name or f"engine-{next(self._numbers)}",
            target="umbra.engines.embedded.embedded_engine:EmbeddedEngine",
            kwargs=settings,
            role="engine",
        )
        return self._session.spawn(spec)
