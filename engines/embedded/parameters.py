from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from umbra.runtime.engine_api.decoder_config import ModelConfig
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.host_memory import populate_range, trim_heap

_ALIGNMENT_NBYTES = 256  # suits the widest vector loads and CUDA's copies


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change `second @ first` of a matrix. R: its rows; E: its columns; N: rank."""

    first: Tensor  # [N, E]
    second: Tensor  # [R, N]


@dataclass(slots=True)
class LayerParameters:
    """One decoder layer. E: hidden size, H: query heads, K: key/value heads, D: head dimension,
    F: intermediate size."""

    input_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2K) D, E]
    qkv_bias: Tensor | None  # [(H + 2K) D]
    qk_norm: Tensor | None  # [H + K, D] q_norm and k_norm repeated; see Parameters.refresh
    output: Tensor  # [E, H D]
    output_bias: Tensor | None  # [E]
    post_norm: Tensor  # [E]
    gate_up: Tensor  # [2F, E]
    gate_up_bias: Tensor | None  # [2F]
    down: Tensor  # [E, F]
    down_bias: Tensor | None  # [E]
    adapters: Mapping[str, LowRank] = field(default_factory=dict[str, LowRank])
    """Changes of the matrices qkv, output, gate_up and down, where a LoRA adapter has one."""


class Parameters:
    """Owns a decoder's weights arena: fused matrices, and views by Hugging Face name.

    Matrices that read the same input are fused (q, k, v; gate, up): fewer, larger products a step.
    A checkpoint tensor copied into its view in `destinations` is, bit for bit, where the forward
    pass reads it. `aliases` maps names of tied tensors to the name that holds the bytes. Call
    `refresh()` after writing to any view.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._config = config
        self.adapters: Mapping[str, LowRank] = {}  # changes of embedding and head
        self._host_copy: Tensor | None = None
        self._arena: Arena | None = None
        self._build()  # on the meta device: counts bytes
        self._arena = Arena(self._offset_nbytes, device)
        self._arena.populate()
        self._build()

    @property
    def arena(self) -> Arena:
        assert self._arena is not None
        return self._arena

    def _build(self) -> None:
        config, width = self._config, self._config.hidden_size
        self._offset_nbytes = 0
        self.destinations: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.embedding = self._add("model.embed_tokens.weight", config.vocab_size, width)
        self.layers = [self._layer(idx) for idx in range(config.num_layers)]
        self.final_norm = self._add("model.norm.weight", width)
        if config.has_tied_embeddings:
            self.aliases["lm_head.weight"] = "model.embed_tokens.weight"
            self.head = self.embedding
        else:
            self.head = self._add("lm_head.weight", config.vocab_size, width)

    def refresh(self) -> None:
        config = self._config
        for idx, layer in enumerate(self.layers):
            if layer.qk_norm is not None:
                prefix = f"model.layers.{idx}.self_attn"
                layer.qk_norm[: config.num_heads] = self.destinations[f"{prefix}.q_norm.weight"]
                layer.qk_norm[config.num_heads :] = self.destinations[f"{prefix}.k_norm.weight"]

    def release(self) -> None:
        self._host_copy = None
        self.arena.release()

    def move_to_host(self) -> None:
        """Frees device memory, keeping the weights in host memory. On the CPU nothing moves."""
        if self.device.type != "cpu" and self.arena.is_resident:
            self._host_copy = self.arena.data.cpu()
            self.arena.release()

    def restore(self) -> None:
        """Allocates memory again, with the weights that `move_to_host` kept, else zeros."""
        self.arena.restore()
        self.arena.populate()
        if self._host_copy is not None:
            self.arena.data.copy_(self._host_copy)
            self._host_copy = None

    def _layer(self, idx: int) -> LayerParameters:
        config, width = self._config, self._config.hidden_size
        prefix = f"model.layers.{idx}"
        query_rows = config.num_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        qkv = {
            f"{prefix}.self_attn.q_proj": query_rows,
            f"{prefix}.self_attn.k_proj": kv_rows,
            f"{prefix}.self_attn.v_proj": kv_rows,
        }
        mlp_rows = config.intermediate_size
        gate_up = {f"{prefix}.mlp.gate_proj": mlp_rows, f"{prefix}.mlp.up_proj": mlp_rows}
        return LayerParameters(
            input_norm=self._add(f"{prefix}.input_layernorm.weight", width),
            qkv=self._add_fused(qkv, ".weight", width),
            qkv_bias=self._add_fused(qkv, ".bias") if config.has_qkv_bias else None,
            qk_norm=self._add_qk_norm(f"{prefix}.self_attn") if config.has_qk_norm else None,
            output=self._add(f"{prefix}.self_attn.o_proj.weight", width, query_rows),
            output_bias=(
                self._add(f"{prefix}.self_attn.o_proj.bias", width)
                if config.has_output_bias
                else None
            ),
            post_norm=self._add(f"{prefix}.post_attention_layernorm.weight", width),
            gate_up=self._add_fused(gate_up, ".weight", width),
            gate_up_bias=self._add_fused(gate_up, ".bias") if config.has_mlp_bias else None,
            down=self._add(f"{prefix}.mlp.down_proj.weight", width, mlp_rows),
            down_bias=(
                self._add(f"{prefix}.mlp.down_proj.bias", width) if config.has_mlp_bias else None
            ),
        )

    def _add(self, name: str, *shape: int) -> Tensor:
        tensor = self._carve(shape)
        self.destinations[name] = tensor
        return tensor

    def _add_fused(self, rows: dict[str, int], suffix: str, *columns: int) -> Tensor:
        fused = self._carve((sum(rows.values()), *columns))
        row = 0
        for name, num_rows in rows.items():
            self.destinations[name + suffix] = fused[row : row + num_rows]
            row += num_rows
        return fused

    def _add_qk_norm(self, prefix: str) -> Tensor:
        config = self._config
        self._add(f"{prefix}.q_norm.weight", config.head_dim)
        self._add(f"{prefix}.k_norm.weight", config.head_dim)
        return self._carve((config.num_heads + config.num_kv_heads, config.head_dim))

    def _carve(self, shape: tuple[int, ...]) -> Tensor:
        offset_nbytes = self._offset_nbytes
        size_nbytes = math.prod(shape) * self.dtype.itemsize
        self._offset_nbytes += -(-size_nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        if self._arena is None:
            return torch.empty(shape, dtype=self.dtype, device="meta")
        return self._arena.view(offset_nbytes, shape, self.dtype)


class Arena:
    """One flat range of device memory that can be freed while its tensors stay valid.

    Weights and KV cache are views of it. `release` frees the pages but keeps the addresses,
    so every view is good again after `restore`. The memory is zero-filled at first and
    after a restore.

    On the CPU it is an anonymous mapping: pages count as resident once touched, and MADV_DONTNEED
    frees them at once. On CUDA the storage is resized to nothing and back.
    """

    def __init__(self, size_nbytes: int, device: torch.device) -> None:
        self.size_nbytes = max(size_nbytes, 1)
        self.is_resident = True
        self._device = device
        self._mapping: mmap.mmap | None = None
        if device.type == "cpu":
            # Private: the pages of a shared mapping would outlive MADV_DONTNEED.
            try:
                self._mapping = mmap.mmap(-1, self.size_nbytes, flags=mmap.MAP_PRIVATE)
            except OSError as error:
                raise ConfigError(
                    f"this machine cannot provide {size_nbytes / 1e9:.1f} GB of memory ({error}); "
                    "lower kv_cache_num_tokens, max_num_seqs or max_context_len"
                ) from error
            # Attention strides over the whole cache: with small pages, address translations alone
            # cost a third of a small model's decode step.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)  # [size_nbytes]
        else:
            self.data = torch.zeros(self.size_nbytes, dtype=torch.uint8, device=device)

    def view(self, offset_nbytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The offset must be a multiple of the element size."""
        size_nbytes = math.prod(shape) * dtype.itemsize
        return self.data[offset_nbytes : offset_nbytes + size_nbytes].view(dtype).view(shape)

    def populate(self) -> None:
        if self._mapping is not None:
            populate_range(self.data.data_ptr(), self.size_nbytes)

    def release(self) -> None:
        """Frees the memory; contents are lost. Views must not be read until `restore`."""
        if not self.is_resident:
            return
        self.is_resident = False
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            trim_heap()
        else:
            self.data.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def restore(self) -> None:
        if self.is_resident:
            return
        if self._mapping is None:
            self.data.untyped_storage().resize_(self.size_nbytes)
            self.data.zero_()
        self.is_resident = True
