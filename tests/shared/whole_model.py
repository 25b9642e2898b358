"""The model as transformers loads it: the reference for ranks that read their own shards."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.model.model_loading import (
    _choose_attention,  # pyright: ignore[reportPrivateUsage]
    _from_pretrained,  # pyright: ignore[reportPrivateUsage]
    _read_config,  # pyright: ignore[reportPrivateUsage]
)


def load_whole_model(section: ModelSection, dtype: torch.dtype) -> tuple[nn.Module, bool]:
    """The model with all its parameters on the CPU, and whether it uses packed attention."""
    model = _from_pretrained(section, dtype, AutoModelForCausalLM, _read_config(section))
    return model, _choose_attention(section, model)
