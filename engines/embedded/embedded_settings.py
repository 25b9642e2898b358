from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from umbra.engines.embedded.scheduler import Limits
from umbra.engines.shell.adapter_settings import EngineSettings
from umbra.runtime.engine_api.decoder_config import ModelConfig
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.host_memory import physical_nbytes

_KV_SHARE_OF_GPU_MEMORY: Final = 0.8
# Share of a GPU's free memory used where no size is set. Activations and logits need the rest.
_KV_SHARE_OF_HOST_MEMORY: Final = 0.5
# Share of a host's memory where no size is set: an upper limit, since pages are taken once used.


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig(EngineSettings):
    """Settings of an embedded engine. Without `kv_cache_num_tokens` the KV cache is enough for
    max_num_seqs sequences of max_context_len, but at most 80 % of a GPU's free memory, or half of a
    host's."""


def parse_device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if name == "cuda" or name.startswith("cuda:"):
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name!r}: this machine has no usable CUDA device; use 'cpu'")
        return torch.device(name)
    raise ConfigError(f"device {name!r} is not supported; allowed: cpu, cuda")


def check_context_len(config: EmbeddedConfig, model: ModelConfig) -> None:
    if config.max_context_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_context_len={config.max_context_len} exceeds the model's "
            f"max_position_embeddings={model.max_position_embeddings}"
        )


def make_limits(
    config: EmbeddedConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Limits:
    """Raises ConfigError if the settings contradict each other or exceed the machine."""
    num_tokens = config.kv_cache_num_tokens
    token_nbytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    if device.type == "cuda":
        memory_nbytes = torch.cuda.mem_get_info(device)[0]
        usable_nbytes = memory_nbytes * _KV_SHARE_OF_GPU_MEMORY
    else:
        memory_nbytes = physical_nbytes()
        usable_nbytes = memory_nbytes * _KV_SHARE_OF_HOST_MEMORY
    if num_tokens is None:
        full_size = config.max_num_seqs * config.max_context_len
        num_tokens = min(full_size, int(usable_nbytes) // token_nbytes)
        if num_tokens < min(full_size, config.max_context_len):
            raise ConfigError(
                f"a sequence of max_context_len={config.max_context_len} takes "
                f"{config.max_context_len * token_nbytes / 1e9:.3g} GB of KV cache, but "
                f"{usable_nbytes / 1e9:.3g} GB of {device.type} memory are available: lower "
                "max_context_len"
            )
    elif num_tokens * token_nbytes > memory_nbytes:
        raise ConfigError(
            f"kv_cache_num_tokens={num_tokens} takes {num_tokens * token_nbytes / 1e9:.3g} GB, but "
            f"{memory_nbytes / 1e9:.3g} GB of {device.type} memory are available: lower it"
        )
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_context_len=config.max_context_len,
        kv_cache_num_tokens=num_tokens,
    )


@contextmanager
def explaining_out_of_memory() -> Generator[None]:
    """Turns a failed allocation into a ConfigError that names the settings to lower."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise ConfigError(
            f"there is not enough memory for the engine ({str(error).splitlines()[0]}): lower "
            "max_context_len, max_num_seqs or kv_cache_num_tokens"
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """On the CPU, torch raises a plain RuntimeError."""
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        return "you tried to allocate" in str(error)
    return True
