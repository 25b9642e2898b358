from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from umbra.engines.embedded.checkpoint_loading import load_checkpoint, parse_dtype
from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_settings import (
    EmbeddedConfig,
    check_context_len,
    explaining_out_of_memory,
    make_limits,
    parse_device,
)
from umbra.engines.shell.engine_requests import RequestCounts
from umbra.runtime.engine_api.decoder_config import load_model_config
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.cpu_affinity import allowed_threads
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import probe_import
from umbra.runtime.weights.transports.shared_memory.pages import trim_heap
from umbra.runtime.weights.weight_receiver import WeightReceiver


class EmbeddedWorker:
    """Model, core and weight receiver, used by one thread; `receiver.stop` may come from any."""

    def __init__(self, config: EmbeddedConfig) -> None:
        if config.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {config.num_threads}")
        torch.set_num_threads(allowed_threads(config.num_threads))
        model_config = load_model_config(config.model_path)
        check_context_len(config, model_config)
        dtype, device = parse_dtype(config.dtype), parse_device(config.device)
        with explaining_out_of_memory():
            self._model = DecoderModel(
                model_config, max_context_len=config.max_context_len, dtype=dtype, device=device
            )
            # Built after the model, because on a GPU the cache gets a share of what is left.
            limits = make_limits(config, model_config, dtype, device)
            self.core = EngineCore(self._model, limits)
        self.receiver = WeightReceiver(self._model.parameters.destinations)
        self._is_paused = False
        if config.load_weights:
            with torch.inference_mode():
                load_checkpoint(config.model_path, self._model.parameters)

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def can_step(self) -> bool:
        return not self._is_paused and self.core.has_work

    def pause(self, *, keep: bool) -> None:
        if not keep:
            self.core.abort()
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def sleep(self, level: int) -> None:
        self.core.preempt_all()
        self.core.cache.release()
        if level == 2:
            self._model.parameters.release()
        else:
            self._model.parameters.move_to_host()
        trim_heap()

    def wake(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self._model.parameters.restore()
        if "kv_cache" in tags:
            self.core.cache.restore()

    def load_update(self) -> int:
        nbytes = self.receiver.load()
        self._model.parameters.refresh()
        return nbytes

    def probe_import(self, allocations: Sequence[object]) -> str:
        device = self._model.parameters.device
        if device.type != "cuda":
            return f"its parameters are in {device.type} memory, not on a GPU"
        return probe_import(allocations)

    def counts(self) -> RequestCounts:
        return RequestCounts(
            running=self.core.num_running,
            waiting=self.core.num_waiting,
            tokens_total=self.core.num_tokens_total,
            kv_tokens_used=self.core.kv_tokens_used,
        )

    def memory(self) -> Mapping[str, int]:
        arena, cache = self._model.parameters.arena, self.core.cache
        return {
            "weights_nbytes": arena.size_nbytes if arena.is_resident else 0,
            "kv_nbytes": cache.size_nbytes if cache.is_resident else 0,
        }
