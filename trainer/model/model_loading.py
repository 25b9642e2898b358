"""Loads the model to be trained. transformers is imported only when a function is called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_parameter_registration_hook

from umbra.runtime.engine_api.kept_tokens import Truncation
from umbra.runtime.engine_api.weight_files import has_own_head
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.text.model_files import default_context_len, not_causal, read_model_config
from umbra.trainer.config.trainer_config import ModelSection, TrainerConfig
from umbra.trainer.model.compiling import decoder_blocks
from umbra.trainer.model.lora_layers import LoraAdapters, origin
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.stored_weights import StoredWeights
from umbra.trainer.model.train_model import PassSettings, PreparedModel, TrainModel

logger = logging.getLogger(__name__)

_FIXED: Final = "fixed"  # any name for which transformers' rotary modules change nothing


def load_model(
    config: TrainerConfig, mesh: DeviceMesh, *, trains: bool, is_critic: bool = False
) -> TrainModel:
    """Shards the configured model over the ranks of the mesh. Collective. Trained parameters are in
    `model.master_dtype`, frozen ones in `model.dtype`, to which passes cast anyway. If adapters are
    trained, the model has them. A critic's head is trained, too."""
    master_dtype: torch.dtype = getattr(torch, config.master_dtype)
    compute_dtype: torch.dtype = getattr(torch, config.model.compute_dtype)
    lora = config.model.lora
    is_frozen = lora.rank > 0 or not trains
    prepared = prepare_causal_lm(config.model, compute_dtype if is_frozen else master_dtype)
    if lora.rank:
        adapters = LoraAdapters(prepared.model, lora, master_dtype)
        prepared = replace(prepared, adapters=adapters, origin=origin(config.model))
    if is_critic:
        prepared = replace(prepared, is_critic=True)
        replace_head(prepared.model, master_dtype)
    context_len = config.pool.max_context_len or default_context_len(config.model.path)
    fix_rotary_frequencies(prepared.model, context_len)
    passes = PassSettings(
        compute_dtype=compute_dtype,
        wrap=config.model.fsdp_wrap,
        temperature=config.rollout.temperature,
        truncation=Truncation(config.rollout.top_p, config.rollout.top_k),
        recomputes=config.train.activation_checkpointing == "full",
        compiles=config.train.compile is True,
    )
    model = TrainModel(prepared, mesh, passes, config.train if trains else None)
    model.is_saved = trains or config.train.reference_every > 0
    return model


def replace_head(model: Any, dtype: torch.dtype) -> None:
    """Gives the model a critic's head, of one output."""
    hidden_size: int = model.config.get_text_config().hidden_size
    device = next(model.parameters()).device
    head = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=dtype)
    model.set_output_embeddings(head)


def prepare_causal_lm(section: ModelSection, dtype: torch.dtype) -> PreparedModel:
    """The causal language model in `section.path` with parameters in `dtype`.

    The parameters take no memory if the weights have the model's own names. transformers loads
    all others on the CPU, converts them, or reports what is missing. Biases by which experts are
    chosen are buffers, and buffers stay in float32 if the files have them so. Raises DataError for
    weights that are missing, unreadable or incomplete, and ConfigError for an encoder, or for
    packed attention that the model cannot use.
    """
    model = _without_memory(section, dtype)
    frozen = _frozen_in_float32(model)
    _make_buffers(model, frozen)
    is_packed = _choose_attention(section, model)
    weights = StoredWeights(section.path)
    is_quantised = getattr(cast("Any", model).config, "quantization_config", None) is not None
    obstacle = "they are quantised" if is_quantised else weights.obstacle(model)
    buffers = weights.float32_buffers(model)
    if obstacle:
        logger.warning("every rank loads all weights of %s: %s", section.path, obstacle)
        kind = _with_float32(type(model), buffers)
        model = _from_pretrained(section, dtype, kind, cast("Any", model).config)
        _make_buffers(model, frozen)
        if is_packed:
            _pack(model)
    for buffer in buffers.values():
        buffer.data = buffer.float()
    for parameter in model.parameters():  # models keep some in float32, and FSDP refuses two dtypes
        parameter.data = parameter.data.to(dtype)
    return PreparedModel(model, is_packed, None if obstacle else weights, path=section.path)


def _without_memory(section: ModelSection, dtype: torch.dtype) -> nn.Module:
    """Parameters are on the meta device; buffers, such as rotary frequencies, are real."""
    library = _transformers()
    auto, generation = library.AutoModelForCausalLM, library.GenerationConfig
    trusts = {"trust_remote_code": section.trust_remote_code}
    try:
        with _parameters_on_meta():
            model = auto.from_config(_read_config(section), dtype=dtype, **trusts)
        if (section.path / "generation_config.json").exists():
            model.generation_config = generation.from_pretrained(str(section.path))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"model.path: {section.path} cannot be loaded: {error}") from error
    # A config may have it unset though no module reads it, as that of GPT-NeoX does. Beside the
    # decoder there may be an encoder of sounds.
    if not all(getattr(module, "is_decoder", True) for module in model.get_decoder().modules()):
        reason = f"is a {type(model).__name__} without is_decoder in its config.json"
        raise not_causal("model.path", section.path, reason)
    model.config.use_cache = False
    assert isinstance(model, nn.Module)
    return model.eval()


def _frozen_in_float32(model: Any) -> list[str]:
    """The parameters that the model itself does not train and keeps in float32 in any dtype."""
    kept = model._keep_in_fp32_modules_strict
    return [
        name
        for name, each in model.named_parameters()
        if not each.requires_grad and any(ending in name for ending in kept)
    ]


def _make_buffers(model: nn.Module, names: Iterable[str]) -> None:
    """Turns parameters into buffers, which nothing trains or casts."""
    for name in names:
        module_name, _, last = name.rpartition(".")
        module, value = model.get_submodule(module_name), model.get_parameter(name).data
        delattr(module, last)
        module.register_buffer(
            last, torch.zeros_like(value, device="cpu") if value.is_meta else value
        )


def _with_float32(kind: type[nn.Module], names: Iterable[str]) -> type[nn.Module]:
    """The class of a model that transformers loads with these tensors in float32."""
    setting = "_keep_in_fp32_modules_strict"
    endings = {name.rpartition(".")[2] for name in names} | {*(getattr(kind, setting) or ())}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, setting: endings})


def _read_config(section: ModelSection) -> Any:
    """Marks a head in the files as not tied, see `has_own_head`; exports have this config, too."""
    has_own = has_own_head(section.path, read_model_config(section.path))
    config: Any = _transformers().AutoConfig.from_pretrained(
        str(section.path), local_files_only=True, trust_remote_code=section.trust_remote_code
    )
    if has_own:
        logger.warning(
            "%s ties the head to the embeddings, and the weights have a head that differs: trainer "
            "and engines use that one. Set tie_word_embeddings to false there to silence this",
            section.path / "config.json",
        )
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
    if quantisation := getattr(config, "quantization_config", None):
        quantisation["dequantize"] = True  # transformers does so by itself only without a GPU
    return config


@contextmanager
def _parameters_on_meta() -> Generator[None]:
    """Replaces each parameter as it is registered, before anything is written to it."""

    def replace(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    register: Any = register_module_parameter_registration_hook  # its annotation lacks the result
    hook = register(replace)
    try:
        yield
    finally:
        hook.remove()


def _choose_attention(section: ModelSection, model: nn.Module) -> bool:
    """Returns whether packed attention is configured and possible; if so, it is set up."""
    if section.attention == "padded":
        return False
    obstacle = _packing_obstacle(model)
    if obstacle and section.attention == "packed":
        raise ConfigError(
            f"model.attention = 'packed' is not possible for {section.path}: {obstacle}; use 'auto'"
        )
    if obstacle:
        logger.warning("attention is padded: %s", obstacle)
        return False
    _pack(model)
    return True


def _pack(model: Any) -> None:
    register_packed_attention()
    model.set_attn_implementation(PACKED_ATTENTION)


def _packing_obstacle(model: Any) -> str:
    """Why samples in one row would see each other, or too little of themselves, or "" if all is
    well. Inspects the model, because the architecture adds to config.json."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"it has layers of type {', '.join(sorted(kinds - {'full_attention'}))}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        return "it uses sliding-window attention"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "it caps attention scores"
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "it has layers that carry a state from token to token"
    if not model._supports_attention_backend:
        return "its attention cannot be exchanged"
    if any(map(_drops_arguments, {type(block) for block in decoder_blocks(model)})):
        return "its decoder blocks pass on nothing to their attention"
    return ""


def _drops_arguments(block: type[nn.Module]) -> bool:
    """Whether further arguments of a forward pass end there, as with Nemotron's blocks: the
    signature alone names them."""
    return inspect.getsource(inspect.unwrap(block.forward)).count("kwargs") == 1


def _from_pretrained(
    section: ModelSection, dtype: torch.dtype, kind: Any, config: Any
) -> nn.Module:
    try:
        model, report = kind.from_pretrained(
            str(section.path),
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported
        )
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"model.path: {section.path} cannot be loaded: {error}") from error
    if getattr(model, "is_quantized", False):
        raise DataError(
            f"model.path: the weights in {section.path} are quantised ({model.quantization_method})"
            ", which cannot be trained, and transformers cannot undo it: give the unquantised ones"
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise DataError(
            f"model.path: {name} has the shape {list(stored)} in {section.path}, and "
            f"{list(expected)} by its config.json: correct that, or save both with save_pretrained"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(
            f"model.path: the weights in {section.path} lack {len(missing)} tensors, such as "
            f"{missing[0]}; the download or export is incomplete"
        )
    model.config.use_cache = False
    assert isinstance(model, nn.Module)
    return model.eval()


def _transformers() -> Any:
    """Turns off progress bars, which each rank would draw over the training's progress."""
    import transformers

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    return library


@torch.no_grad()
def fix_rotary_frequencies(model: nn.Module, context_len: int) -> None:
    """Fixes rotary frequencies that depend on a length by the longest context, as engines do.
    transformers chooses "longrope" and "dynamic" ones by the longest sequence of a batch: a sample
    would have other log-probabilities beside a longer one than alone."""
    for module in model.modules():
        rotary: Any = module
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_chosen(kinds):
            rotary(torch.empty(0), torch.tensor([[context_len - 1]]))
            rotary.rope_type = _FIXED
        elif isinstance(kinds, dict):  # by the type of a layer
            for layer_type, kind in list(cast("dict[str, str]", kinds).items()):
                if _is_chosen(kind):
                    rotary(torch.empty(0), torch.tensor([[context_len - 1]]), layer_type)
                    kinds[layer_type] = _FIXED


def _is_chosen(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind
