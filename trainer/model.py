"""Loads the model that is trained. transformers is imported here, and only when called."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from umbra.runtime.errors import ConfigError, DataError
from umbra.trainer.config import ModelSection
from umbra.trainer.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.tokenizer import read_model_config

logger = logging.getLogger(__name__)


def load_causal_lm(section: ModelSection, dtype: torch.dtype) -> tuple[nn.Module, bool]:
    """The causal language model in `section.path` with parameters in `dtype`, on the CPU.

    Returns:
        The model, and whether it uses packed attention.

    Raises:
        DataError: no such directory, unreadable or incomplete weights.
        ConfigError: an architecture or option that cannot be trained here.
    """
    raw = read_model_config(section.path)
    is_packed = _choose_packed(section, raw)
    if is_packed:
        register_packed_attention()
    model = _from_pretrained(section, dtype, PACKED_ATTENTION if is_packed else "sdpa")
    return model, is_packed


def _choose_packed(section: ModelSection, raw: Mapping[str, Any]) -> bool:
    if section.attention == "padded":
        return False
    obstacle = _packing_obstacle(raw)
    if obstacle and section.attention == "packed":
        raise ConfigError(
            f"model.attention = 'packed' is not possible for {section.path}: {obstacle}; use 'auto'"
        )
    if obstacle:
        logger.warning("attention is padded: %s", obstacle)
    return not obstacle


def _packing_obstacle(raw: Mapping[str, Any]) -> str:
    """Why packed attention would not be this model's attention; "" if it is."""
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"it has layers of type {', '.join(sorted(kinds - {'full_attention'}))}"
    uses_window = raw.get("use_sliding_window", raw.get("sliding_window") is not None)
    if uses_window and raw.get("sliding_window") is not None:
        return "it uses sliding-window attention"
    if raw.get("attn_logit_softcapping") is not None:
        return "it caps attention scores"
    return ""


def _from_pretrained(section: ModelSection, dtype: torch.dtype, attention: str) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    quiet: Any = transformers_logging
    quiet.disable_progress_bar()  # one bar a rank would draw over the training's own
    auto: Any = AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(
            str(section.path),
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"model.path: {section.path} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise DataError(
            f"model.path: the weights in {section.path} lack {len(missing)} tensors, such as "
            f"{missing[0]}; the download or export is incomplete"
        )
    model.config.use_cache = False
    assert isinstance(model, nn.Module)
    return model.eval()


def parameter_count(model: nn.Module) -> int:
    """Numbers in all distinct parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
