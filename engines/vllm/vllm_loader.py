"""vLLM's loader of a model's weights, in its worker processes. After loading, layerwise reload
rebuilds what each layer derives from its weights (prepacked for the CPU, quantised, fused)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from umbra.engines.loading.loader_recording import LoaderRecording
from umbra.engines.loading.weight_source import WeightSource
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.manifest import Manifest

_reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload")
_layerwise: Any = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
_default_loader: Any = _layerwise.default_weight_loader

_linear: Any = importlib.import_module("vllm.model_executor.layers.linear")
_vocab: Any = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding")
_embedding: Any = _vocab.VocabParallelEmbedding
_QuantizeMethod: Any = importlib.import_module(
    "vllm.model_executor.layers.quantization.base_config"
).QuantizeMethodBase
_AttentionScales: Any = importlib.import_module(
    "vllm.model_executor.layers.quantization.kv_cache"
).BaseKVCacheMethod
_UNPROCESSED_METHODS: Final[frozenset[Any]] = frozenset(
    (_linear.UnquantizedLinearMethod, _vocab.UnquantizedEmbeddingMethod)
)
# Methods that change nothing after loading, except on the CPU.
_CPU_PREPACKED_ATTRS: Final = ("cpu_linear", "_cpu_unpacked_conv_weight")
# Attributes that vLLM makes of a layer's weight.
_meta: Any = importlib.import_module("vllm.model_executor.model_loader.reload.meta")
_ATTENTION: Final[tuple[Any, ...]] = (
    importlib.import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase,
    importlib.import_module("vllm.model_executor.layers.attention").MMEncoderAttention,
)
_SKIPPED_TENSORS: Final[frozenset[str]] = frozenset(_meta.SKIP_TENSORS)
# Names of tensors that layerwise reload leaves alone.


class LayerwiseLoader:
    """vLLM's loader in layerwise reload: loads a layer into new memory, rebuilds there what is
    derived from its weights, and copies the result to the layer's own memory.

    Recording happens outside layerwise reload, except for layers that certainly need it.

    Attributes:
        unread: tensors that the last recorded load has not read; empty if recording failed.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._ties = _ties(model)
        self.unread: list[str] = []

    def record(self, source: WeightSource) -> tuple[LoaderRecording, Mapping[nn.Module, str]]:
        """Loads once, and again in layerwise reload if layerwise reload may change the result."""
        self._check_ties(source.manifest)
        self._restore()
        found = {layer: _why_reloaded(layer) for layer in self._model.modules()}
        reasons = {layer: reason for layer, reason in found.items() if reason}
        recording = LoaderRecording(self._model)
        try:
            with recording, _processing_apart(recording):
                self._load(list(reasons), recording.watch(source.tensors()), recording)
            self.unread = recording.unread()
        except WeightSyncError:
            raise
        except Exception as error:  # noqa: BLE001 - a loader may refuse parameters in any way
            reasons = {self._model: f"its loader failed: {type(error).__name__}: {error}"}
            self.unread = []
            self._restore()
        reloaded = {child for layer in reasons for child in layer.modules()}
        moved = recording.tensors.moved() - reloaded
        if moved or self._model in reasons or any(map(_may_change, self._kept(reloaded))):
            recording.tensors.put_back()
            self._load(None, source.tensors())
        attention, ties = LoaderRecording(self._model), LoaderRecording(self._model)
        with attention:
            for layer in filter(_is_processed_last, self._kept(reloaded)):
                layer.process_weights_after_loading(self._model_config.dtype)
        with ties:
            self._finish_ties(None)
        if attention.read_back:
            return recording, {self._model: "something is computed from parameters after loading"}
        written = {each.target.storage for each in (*recording.copies, *recording.fills)}
        for storage in ties.read_back & written:
            tied = recording.tensors.layers[storage]
            reasons = dict.fromkeys(tied, "it is tied and prepacked") | reasons
        return recording, dict.fromkeys(moved, "its loader moves its parameters") | reasons

    def _check_ties(self, manifest: Manifest) -> None:
        """Refuses a separate head where vLLM ties it to the embeddings."""
        sent = {_tail(entry.name) for entry in manifest.entries}
        for second, first in self._ties.items():
            tails = {_tail(second), _tail(first)}
            if ".layers." not in second and len(tails) == 2 and tails <= sent:
                raise WeightSyncError(
                    f"vLLM's model ties {second} to {first}, and the trainer has two tensors: set "
                    "tie_word_embeddings to false in the model's config.json"
                )

    def _kept(self, reloaded: Collection[nn.Module]) -> list[Any]:
        return [layer for layer in self._model.modules() if layer not in reloaded]

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        self._restore()
        self._load(layers, tensors)
        self._finish_ties(layers)
        self._empty_cache()

    def _load(
        self,
        layers: Sequence[nn.Module] | None,
        tensors: Iterator[tuple[str, Tensor]],
        recording: LoaderRecording | None = None,
    ) -> None:
        reloaded = [self._model] if layers is None else layers
        for layer in reloaded:
            _reload.initialize_layerwise_reload(layer)
        model: Any = self._model
        loaded: set[str] | None = model.load_weights(tensors)
        if layers is None or recording is not None:  # others are loaded with what was complete
            self._check_complete(loaded)
            if not self._model_config.quantization:
                _check_whole(self._model, recording)
        for layer in reloaded:
            _reload.finalize_layerwise_reload(layer, self._model_config)

    def _finish_ties(self, layers: Sequence[nn.Module] | None) -> None:
        """Processes tied layers, which layerwise reload (0.32) leaves out."""
        reloaded = {each for layer in layers or () for each in layer.modules()}
        for name in self._ties:
            layer: Any = self._model.get_submodule(name.rpartition(".")[0])
            if hasattr(layer, "quant_method") and (layers is None or layer in reloaded):
                layer.quant_method.process_weights_after_loading(layer)

    def _empty_cache(self) -> None:
        """Frees what loading took, because others share the GPU with this engine in turns."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _check_complete(self, loaded: set[str] | None) -> None:
        if loaded is None:  # the model's loader does not report what it loaded
            return
        model: Any = self._model
        names: list[str] = [
            f"{prefix}.{name}" if prefix else name
            for prefix, layer in model.named_modules()
            for name, _ in layer.named_parameters(recurse=False)
            if _is_loaded(layer, name)
        ]
        ties = self._ties
        missing = sorted(
            _plain(name)
            for name in names
            if loaded.isdisjoint(_loaded_as(name) | _loaded_as(ties.get(name, name)))
        )
        if missing:
            raise WeightSyncError(
                f"the trainer's weights do not fill {len(missing)} of vLLM's parameters: "
                f"{', '.join(missing[:5])}"
            )

    def _restore(self) -> None:
        """Ends an update that failed: vLLM (0.32) would otherwise continue with its tensors."""
        half_loaded = [
            info
            for info in map(_layerwise.get_layerwise_info, self._model.modules())
            if info.can_load()
        ]
        for info in half_loaded:
            info.loaded_weights.clear()
            info.load_numel = 0
        if half_loaded:  # layers get their tensors back, whatever is in them
            _reload.finalize_layerwise_reload(self._model, self._model_config)


def _why_reloaded(layer: nn.Module) -> str:
    """Why a layer must be loaded in layerwise reload; "" if no reason is known."""
    if any(hasattr(layer, name) for name in _CPU_PREPACKED_ATTRS):  # parameters may look as before
        return "vLLM prepacks it for the CPU"
    before: dict[str, Any]
    before, _ = _layerwise.get_layerwise_info(layer).restore_metadata
    now: dict[str, Any] = dict(layer.named_parameters(recurse=False))
    if any(
        _form(before.get(name)) != _form(now.get(name))
        for name in {*before, *now} - _SKIPPED_TENSORS
    ):
        return "it changes its parameters after loading"
    return ""


def _is_loaded(layer: nn.Module, name: str) -> bool:
    """Whether a parameter comes from the checkpoint, unlike scales that vLLM makes
    after loading."""
    if isinstance(getattr(layer, "quant_method", None), _AttentionScales):
        return False
    before: dict[str, Any]
    before, _ = _layerwise.get_layerwise_info(layer).restore_metadata
    return name in before or name in _SKIPPED_TENSORS


def _may_change(layer: nn.Module) -> bool:
    method: object = getattr(layer, "quant_method", None)
    if not isinstance(method, _QuantizeMethod):
        return False
    is_on_cpu = any(each.device.type == "cpu" for each in layer.parameters(recurse=False))
    return is_on_cpu or type(method) not in _UNPROCESSED_METHODS


def _is_processed_last(layer: nn.Module) -> bool:
    """Whether layerwise reload processes a layer after those whose weights it uses."""
    return isinstance(layer, _ATTENTION) and hasattr(layer, "process_weights_after_loading")


@contextmanager
def _processing_apart(recording: LoaderRecording) -> Generator[None]:
    """Pauses the recording while layerwise reload (0.32) processes a layer by its values."""
    process = _layerwise._layerwise_process

    def process_apart(*args: Any) -> None:
        with recording.paused():
            process(*args)

    _layerwise._layerwise_process = process_apart
    try:
        yield
    finally:
        _layerwise._layerwise_process = process


def _form(parameter: Any) -> tuple[object, ...]:
    if parameter is None:
        return ()
    # Layerwise reload leaves wrapped loaders on its metadata, even where there were none.
    loader = inspect.unwrap(getattr(parameter, "weight_loader", _default_loader))
    has_loader = loader is not _default_loader
    kind = cast("type[object]", type(parameter))  # vLLM's own ones have loaders as methods
    return kind, parameter.dtype, tuple(parameter.shape), parameter.stride(), has_loader


def _plain(name: str) -> str:
    """A parameter's name in the checkpoint: adapters that wrap a layer change it."""
    return name.replace(".base_layer.", ".")


def _tail(name: str) -> str:
    """The end of a name, which is the same in the checkpoint and in vLLM."""
    return ".".join(_plain(name).split(".")[-2:])


def _loaded_as(name: str) -> set[str]:
    """The names that vLLM's loaders report: before 0.32, experts count to the layer above."""
    plain = _plain(name)
    return {plain, plain.replace(".routed_experts.", ".")}


def _check_whole(model: nn.Module, recording: LoaderRecording | None) -> None:
    """Raises WeightSyncError for a layer that got only some of its weights, such as q without k."""
    modules: Any = model
    for name, layer in modules.named_modules():
        if isinstance(layer, _embedding):  # embeddings have padding
            continue
        for num_loaded, num_elements in _loaded_elements(layer, recording):
            if 0 < num_loaded < num_elements:
                raise WeightSyncError(
                    f"the trainer's weights fill {num_loaded} of {num_elements} elements of vLLM's "
                    f"layer {name}"
                )


def _loaded_elements(layer: nn.Module, recording: LoaderRecording | None) -> list[tuple[int, int]]:
    """(loaded, all) elements of a layer in layerwise reload, or of each recorded parameter."""
    info: Any = _layerwise.get_layerwise_info(layer)
    if info.can_load():
        return [(info.load_numel, info.load_numel_total)]
    if recording is None:
        return []
    parameters = layer.parameters(recurse=False)
    return [(recording.num_written(each), _loadable_numel(each)) for each in parameters]


def _loadable_numel(parameter: Tensor) -> int:
    """Elements without the padding that vLLM (0.32) declares."""
    return getattr(parameter, "weight_loader_numel", parameter.numel())


def _ties(model: nn.Module) -> dict[str, str]:
    """Maps second names of tied parameters to the first."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            ties[name] = known
    return ties
