from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from umbra.engines.embedded.decoder_model import DecoderModel
from umbra.engines.embedded.embedded_core import EngineCore
from umbra.engines.embedded.embedded_settings import (
    EmbeddedConfig,
    check_context_len,
    explaining_out_of_memory,
    make_limits,
    parse_device,
)
from umbra.engines.embedded.parameters import LowRank, Parameters
from umbra.engines.embedded.weight_receiver import WeightReceiver
from umbra.engines.shell.engine_requests import RequestCounts
from umbra.runtime.engine_api.decoder_config import load_model_config
from umbra.runtime.engine_api.lora import EMBEDDING, LINEAR, PEFT_PREFIX, LoraSpec, module_shapes
from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import ConfigError, DataError, WeightSyncError
from umbra.runtime.process.cpu_affinity import allowed_threads
from umbra.runtime.process.host_memory import trim_heap
from umbra.runtime.weights.exports.ipc_memory import probe_import
from umbra.runtime.weights.manifest import Manifest

DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_READABLE: Final = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_IGNORED_SUFFIXES: Final = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The layers, in order, of each fused matrix of `LayerParameters`."""
_OUTER: Final[Mapping[str, str]] = {"embedding": "model.embed_tokens", "head": "lm_head"}
"""The layers of `Parameters` outside of these."""


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
        self._adapters = Adapters(self._model.parameters) if config.lora_rank else None
        self.receiver = WeightReceiver(self._model.parameters.destinations)
        self._is_paused = False
        if config.reads_weights:
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

    def sleep(self, level: int, tags: Sequence[str]) -> None:
        self.core.preempt_all()
        if "kv_cache" in tags:
            self.core.cache.release()
        if "weights" in tags and level == 2:
            self._model.parameters.release()
        elif "weights" in tags:
            self._model.parameters.move_to_host()
        trim_heap()

    def wake(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self._model.parameters.restore()
        if "kv_cache" in tags:
            self.core.cache.restore()

    def begin_update(self, manifest: bytes, buckets: Mapping[str, Any]) -> None:
        if self._adapters is not None and self._adapters.prepare(Manifest.from_wire(manifest)):
            self.receiver.close()
            self.receiver = WeightReceiver(self._adapters.matrices)
        self.receiver.begin(manifest, buckets)

    def load_update(self) -> int:
        nbytes = self.receiver.load()
        if self._adapters is not None:
            self._adapters.apply()
        else:
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


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def load_checkpoint(model_path: str, parameters: Parameters) -> None:
    """Fills all parameters from safetensors files, converting to their dtype. Raises DataError for
    files or tensors that are missing, unexpected, mis-shaped or unusable."""
    missing = set(parameters.destinations)
    with ExitStack() as stack:
        for name, tensor, file in _tensors(model_path, stack):
            if name.endswith(_IGNORED_SUFFIXES):
                continue
            own_name = parameters.aliases.get(name, name)
            target = parameters.destinations.get(own_name)
            if target is None:
                raise DataError(
                    f"{file} holds {name!r}, which this architecture does not have; config.json "
                    "and the weights are from different models"
                )
            _check(name, tensor, target, file)
            target.copy_(tensor)  # a tied tensor may be there twice, with the same bytes
            missing.discard(own_name)
    if missing:
        names = sorted(missing)
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise DataError(
            f"{model_path} lacks {len(names)} tensors of the architecture in its config.json: "
            f"{shown}"
        )
    parameters.refresh()


def _check(name: str, tensor: Tensor, target: Tensor, file: Path) -> None:
    if tensor.shape != target.shape:
        raise DataError(
            f"{file}: {name!r} has shape {tuple(tensor.shape)}, config.json asks for "
            f"{tuple(target.shape)}"
        )
    if tensor.dtype not in _READABLE:
        raise DataError(
            f"{file}: {name!r} has dtype {tensor.dtype}; allowed: float16, bfloat16, float32, "
            "float64 (quantised checkpoints are not supported)"
        )


def _tensors(model_path: str, stack: ExitStack) -> Iterator[tuple[str, Tensor, Path]]:
    for file in WeightFiles(Path(model_path)).files:
        try:
            reader = cast(Any, stack.enter_context(safe_open(str(file), framework="pt")))
            names: list[str] = list(reader.keys())
            for name in names:
                yield name, cast(Tensor, reader.get_tensor(name)), file
        except (OSError, SafetensorError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error


class Adapters:
    """Owns the matrices that a sync writes, and their products' form beside `parameters`. With a
    scaled product the model computes as the trainer does; a merged weight would be rounded again.

    Attributes:
        matrices: by PEFT's names; empty before the first sync.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._spec: LoraSpec | None = None
        self.matrices: dict[str, Tensor] = {}

    def prepare(self, manifest: Manifest) -> bool:
        """Allocates the matrices that a manifest describes, unless they exist; returns whether it
        did. Raises WeightSyncError for a layer that cannot have any."""
        assert manifest.lora is not None
        self._spec = manifest.lora
        if {name: tuple(matrix.shape) for name, matrix in self.matrices.items()} == manifest.shapes:
            return False
        layers = range(len(self._parameters.layers))
        places = {f"model.layers.{n}.{part}" for n in layers for p in _PARTS.values() for part in p}
        places |= set(_OUTER.values())
        if others := sorted(module_shapes(manifest.shapes).keys() - places):
            raise WeightSyncError(
                f"the embedded engine applies no LoRA adapter to {len(others)} of the layers that "
                f"this one is for: {others[0]}"
            )
        self.matrices = {
            name: torch.empty(shape, dtype=self._parameters.dtype, device=self._parameters.device)
            for name, shape in manifest.shapes.items()
        }
        return True

    def apply(self) -> None:
        """Gives new matrices to all later passes."""
        self._parameters.adapters = {
            field: fused for field, name in _OUTER.items() if (fused := self._fuse([name]))
        }
        for idx, layer in enumerate(self._parameters.layers):
            layer.adapters = {
                field: fused
                for field, parts in _PARTS.items()
                if (fused := self._fuse([f"model.layers.{idx}.{part}" for part in parts]))
            }

    def _fuse(self, names: list[str]) -> LowRank | None:
        """The adapters of the parts of one matrix as one; None if there are none."""
        assert self._spec is not None
        pairs = [self._pair(name) for name in names]
        firsts = [pair[0] for pair in pairs if pair]
        if not firsts:
            return None
        parameters, weights = self._parameters, [f"{name}.weight" for name in names]
        rows = [len(parameters.destinations[parameters.aliases.get(w, w)]) for w in weights]
        first = torch.cat(firsts)  # [N, E]
        second = first.new_zeros(sum(rows), len(first))  # [R, N]
        row = column = 0
        for num_rows, pair in zip(rows, pairs, strict=True):
            if pair:
                of_part = pair[1]
                block = second[row : row + num_rows, column : column + of_part.shape[1]]
                torch.mul(of_part, self._spec.alpha / self._spec.rank, out=block)
                column += of_part.shape[1]
            row += num_rows
        return LowRank(first, second)

    def _pair(self, name: str) -> tuple[Tensor, Tensor] | None:
        """[N, E] and [R, N]: the matrices of one layer, if it has some."""
        for ends in (LINEAR, EMBEDDING):
            first, second = (self.matrices.get(f"{PEFT_PREFIX}{name}{end}") for end in ends)
            if first is not None and second is not None:
                return (first, second) if ends is LINEAR else (second.t(), first.t())
        return None
