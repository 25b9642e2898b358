"""The embedded engine as one synchronous object: model, core, lifecycle and weight updates.

Everything here runs in the compute thread but `end_waits`; only `load` waits, for the ranks. See
`actor` for the async face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from umbra.engines.embedded.checkpoint_loading import load_checkpoint, parse_dtype
from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_settings import (
    EmbeddedConfig,
    check_context_len,
    make_limits,
    naming_lack_of_memory,
    parse_device,
)
from umbra.engines.shell.engine_gate import EngineGate
from umbra.engines.shell.resident_memory import resident_nbytes
from umbra.runtime.engine_api.decoder_config import load_model_config
from umbra.runtime.engine_api.delta_buffer import DeltaColumns
from umbra.runtime.engine_api.engine_protocol import EngineStats, PauseMode
from umbra.runtime.engine_api.generation_request import parse_request
from umbra.runtime.engine_api.lifecycle import SleepLevel, Tag
from umbra.runtime.errors import ConfigError
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import probe_import
from umbra.runtime.weights.transports.shared_memory.pages import trim_heap
from umbra.runtime.weights.weight_receiver import WeightReceiver


class EmbeddedWorker:
    """Owns model and core. Not thread-safe: one thread builds and uses it.

    Raises (the constructor):
        ConfigError, DataError: settings or model directory cannot be used; says why.
    """

    def __init__(self, config: EmbeddedConfig) -> None:
        if config.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {config.num_threads}")
        torch.set_num_threads(config.num_threads)
        model_config = load_model_config(config.model_path)
        check_context_len(config, model_config)
        dtype, device = parse_dtype(config.dtype), parse_device(config.device)
        with naming_lack_of_memory():
            self._model = DecoderModel(
                model_config, max_context_len=config.max_context_len, dtype=dtype, device=device
            )
            # After the model: on a GPU the cache gets a share of what is left.
            self._limits = make_limits(config, model_config, dtype, device)
            self._core = EngineCore(self._model, self._limits)
        self._receiver = WeightReceiver(self._model.parameters.destinations)
        self._gate = EngineGate()
        self._on_drained: list[Callable[[], None]] = []
        if config.load_weights:
            with torch.inference_mode():
                load_checkpoint(config.model_path, self._model.parameters)
            self._gate.start_serving(0)

    # -- stepping, for the compute thread ------------------------------------------------

    @property
    def can_step(self) -> bool:
        return self._gate.is_serving and self._core.has_work

    def step(self) -> None:
        self._core.step()
        self._settle_drain()

    @property
    def has_finishes(self) -> bool:
        """Requests have ended whose end has not been taken."""
        return self._core.has_finishes

    def take_deltas(self) -> DeltaColumns | None:
        return self._core.take_deltas()

    def forget_requests(self) -> None:
        """The consumer has gone."""
        self._core.forget()
        self._settle_drain()

    # -- requests ------------------------------------------------------------------------

    def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        self._gate.admit()
        self._core.add(
            [
                parse_request(
                    raw,
                    max_context_len=self._limits.max_context_len,
                    vocab_size=self._model.config.vocab_size,
                )
                for raw in requests
            ]
        )

    def abort(self, ids: Sequence[int] | None) -> int:
        count = self._core.abort(ids)
        self._settle_drain()
        return count

    def pause(self, mode: PauseMode, on_paused: Callable[[], None]) -> None:
        """Calls `on_paused` once nothing is generated any more; for "drain" that may be later."""
        if mode not in ("abort", "keep", "drain"):
            raise ValueError(f"pause mode must be abort, keep or drain, got {mode!r}")
        self._on_drained.append(on_paused)
        if mode == "drain":
            self._gate.drain()
        else:
            if mode == "abort":
                self._core.abort()
            self._gate.pause()
        self._settle_drain()

    def resume(self) -> None:
        self._gate.resume()
        self._settle_drain()

    def _settle_drain(self) -> None:
        if self._gate.is_draining and not self._core.has_work:
            self._gate.pause()
        if not self._gate.is_draining:
            waiting, self._on_drained = self._on_drained, []
            for on_paused in waiting:
                on_paused()

    # -- memory --------------------------------------------------------------------------

    def sleep(self, level: SleepLevel) -> None:
        """Frozen requests (pause "keep") are recomputed after the next resume."""
        if not self._core.has_work:
            self._gate.pause()
        self._gate.sleep(level)
        self._receiver.close()
        self._core.preempt_all()
        self._core.cache.release()
        if level == 2:
            self._model.parameters.release()
        else:
            self._model.parameters.move_to_host()
        trim_heap()

    def wake(self, tags: Sequence[Tag]) -> None:
        wanted = self._gate.wake(tags)
        if not wanted:
            return
        if "weights" in wanted:
            self._model.parameters.restore()
        if "kv_cache" in wanted:
            self._core.cache.restore()
        self._gate.woken()

    # -- weights -------------------------------------------------------------------------

    def probe_import(self, allocations: Sequence[object]) -> str:
        device = self._model.parameters.device
        if device.type != "cuda":
            return f"its parameters are in memory of {device.type}, not of a GPU"
        return probe_import(allocations)

    def begin_update(
        self, version: int, manifest: Mapping[str, Any], buckets: Mapping[str, Any]
    ) -> None:
        """Frozen requests keep their KV cache, so they go on with keys of the older weights."""
        self._gate.begin_update(version, is_idle=not self._core.has_work)
        self._receiver.begin(manifest, buckets)

    def load(self) -> dict[str, int]:
        """Waits for ranks; nothing else is done meanwhile."""
        self._gate.touch()
        return {"nbytes": self._receiver.load()}

    def end_waits(self) -> None:
        """Has a `load` that waits raise WeightSyncError soon. From any thread."""
        self._receiver.stop()

    def finish_update(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        return self._receiver.finish(regions)

    def commit_update(self) -> None:
        self._receiver.check_open()
        version = self._gate.commit_update()
        self._receiver.end()
        self._model.parameters.refresh()
        self._core.set_version(version)

    def abort_update(self) -> None:
        self._receiver.end()
        self._gate.abort_update()

    def stats(self) -> EngineStats:
        core, parameters = self._core, self._model.parameters
        version = self._gate.version
        return EngineStats(
            running=core.num_running,
            waiting=core.num_waiting,
            tokens_total=core.num_tokens_total,
            kv_tokens_used=core.kv_tokens_used,
            version=-1 if version is None else version,
            resident_nbytes=resident_nbytes(),
            weights_nbytes=parameters.arena.size_nbytes if parameters.arena.is_resident else 0,
            kv_nbytes=core.cache.size_nbytes if core.cache.is_resident else 0,
        )
