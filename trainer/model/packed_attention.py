"""Attention over packed rows, for any `transformers` model that uses its attention interface with
plain causal attention. transformers forwards `packed` from the model's call to each layer.

L: packed rows; H, H_kv: heads; D, D_v: their size; B, C, K as in `packing`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from umbra.runtime.errors import ConfigError
from umbra.trainer.model.packing import AttentionBlock, PackedInputs, VarlenLayout

PACKED_ATTENTION: Final = "umbra_packed"
_MAX_HEAD_SIZE: Final = 256  # limit of the flash kernel
_CHANGES_SCORES: Final = ("s_aux", "softcap", "sliding_window")  # if they are not None


def register_packed_attention() -> None:
    """Makes `attn_implementation=PACKED_ATTENTION` known to transformers."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    interface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedInputs,
    regathers: bool = False,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, H, L, D] queries and keys and [1, H_kv, L, D_v] values to [1, L, H, D_v].

    With `regathers`, keys and values are kept for the backward pass as packed rows and gathered
    again there; without, a prompt's are kept once for each completion. Recomputation and
    torch.compile keep less by themselves, which this would undo. Raises ConfigError unless the
    model's attention is plain causal attention.
    """
    assert attention_mask is None, "packed rows carry their own masks"
    for name in _CHANGES_SCORES:
        if options.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} passes {name} to its attention, which packed attention "
                "does not support; set model.attention = 'padded'"
            )
    queries = _rows(query)  # [L, H * D]
    keys, values = _rows(key), _rows(value)  # [L, H_kv * D]
    heads = (query.shape[1], key.shape[1])
    if packed.varlen is not None:
        output = _attend_varlen(packed.varlen, queries, keys, values, heads, scaling, regathers)
    else:
        output = _blocks_uncompiled(packed, queries, keys, values, heads, scaling, regathers)
    return output.view(1, query.shape[2], query.shape[1], value.shape[3]), None


def _rows(heads_first: Tensor) -> Tensor:
    """[1, H, L, D] to [L, H * D]; a view, because models transpose it from [1, L, H, D]."""
    return heads_first[0].transpose(0, 1).flatten(1)


def _attend_blocks(
    packed: PackedInputs,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: tuple[int, int],
    scaling: float | None,
    regathers: bool,
) -> Tensor:
    outputs = [
        _attend(block, queries, keys, values, heads, scaling, regathers) for block in packed.blocks
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


_compiler: Any = torch.compiler
_blocks_uncompiled: Callable[..., Tensor] = _compiler.disable(_attend_blocks)
# If compiled, it would be compiled again for each number and shape of blocks. It takes `packed` as
# a whole, because compiled code that reads the blocks would be specialised for their number.


def _attend(
    block: AttentionBlock,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: tuple[int, int],
    scaling: float | None,
    regathers: bool,
) -> Tensor:
    """Output of a block's rows, [rows, H * D_v]."""
    num_sequences, num_queries, num_keys = block.shape
    num_heads, num_kv_heads = heads
    if block.query_rows is None:
        picked = queries[block.rows[0] : block.rows[1]]
    else:
        picked = queries.index_select(0, block.query_rows)
    q = picked.view(num_sequences, num_queries, num_heads, -1).transpose(1, 2)

    def gather(rows: Tensor) -> Tensor:
        found = rows.index_select(0, block.key_rows)
        return found.view(num_sequences, num_keys, num_kv_heads, -1).transpose(1, 2)

    k, v = gather(keys), gather(values)
    with _kept_as_rows(gather, (k, keys), (v, values)) if regathers else nullcontext():
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=block.mask,
            is_causal=block.mask is None,
            scale=scaling,
            enable_gqa=num_heads != num_kv_heads,
        )  # [B, H, C, D]
    flat = out.transpose(1, 2).reshape(num_sequences * num_queries, -1)
    return flat if block.output_rows is None else flat.index_select(0, block.output_rows)


def _attend_varlen(
    layout: VarlenLayout,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: tuple[int, int],
    scaling: float | None,
    regathers: bool,
) -> Tensor:
    """Output of all rows, [L, H * D_v], from the flash kernel for sequences of any length.

    The kernel aligns the causal triangle at the end of queries and keys. A completion, whose keys
    begin with its prompt, therefore sees all of the prompt, and itself up to each query.
    """
    from torch.nn.attention.varlen import varlen_attn  # exists on CUDA only

    kernel: Any = varlen_attn
    num_heads, num_kv_heads = heads
    head_size = queries.shape[-1] // num_heads
    value_size = values.shape[-1] // num_kv_heads
    width = _kernel_width(head_size, value_size)
    options: dict[str, Any] = {}
    num_repeats = 1
    if num_heads != num_kv_heads:
        if "enable_gqa" in inspect.signature(kernel).parameters:
            options["enable_gqa"] = True
        else:  # torch before 2.12
            num_repeats = num_heads // num_kv_heads

    def gather(rows: Tensor) -> Tensor:
        found = layout.keys.gather(rows).view(len(layout.keys.rows), num_kv_heads, -1)
        found = _widened(found, width)
        return found if num_repeats == 1 else found.repeat_interleave(num_repeats, dim=1)

    k, v = gather(keys), gather(values)
    with _kept_as_rows(gather, (k, keys), (v, values)) if regathers else nullcontext():
        output: Tensor = kernel(
            _widened(queries.view(len(queries), num_heads, -1), width),
            k,
            v,
            layout.query_starts,
            layout.key_starts,
            layout.max_queries,
            layout.max_keys,
            scale=head_size**-0.5 if scaling is None else scaling,
            window_size=(-1, 0),
            **options,
        )
    return output[..., :value_size].flatten(1)


def _kept_as_rows(
    gather: Callable[[Tensor], Tensor], *gathered: tuple[Tensor, Tensor]
) -> saved_tensors_hooks:
    """Within the block, the backward pass keeps rows in place of the tensors gathered from them.
    `gathered` has pairs of a tensor that `gather` made and its rows."""
    rows_of = {made.untyped_storage().data_ptr(): rows.detach() for made, rows in gathered}

    def keep(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        rows = rows_of.get(saved.untyped_storage().data_ptr())
        if rows is None:
            return saved
        shape, stride, offset = saved.shape, saved.stride(), saved.storage_offset()
        return lambda: gather(rows).as_strided(shape, stride, offset)

    @torch.no_grad()
    def restore(kept: Tensor | Callable[[], Tensor]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept()

    return saved_tensors_hooks(keep, restore)


def _kernel_width(*sizes: int) -> int:
    """The kernel's width for heads of these sizes: one for all, a multiple of 8. Raises ConfigError
    if the heads are wider than the kernel allows."""
    width = max(sizes)
    if width > _MAX_HEAD_SIZE:
        raise ConfigError(
            f"packed attention supports heads of at most {_MAX_HEAD_SIZE} elements on GPUs, the "
            f"model's have {width}; set model.attention = 'padded'"
        )
    return width + -width % 8


def _widened(heads: Tensor, width: int) -> Tensor:
    """Pads each head [.., D] with zeros, which change no score."""
    return F.pad(heads, (0, width - heads.shape[-1])) if heads.shape[-1] < width else heads
