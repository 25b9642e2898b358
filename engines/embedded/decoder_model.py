"""The forward pass of Llama-like decoders (Llama, Qwen2, Qwen3) over a row KV cache.

The operations are few and large: with a fraction of a million parameters, the number of torch calls
costs a step as much as their arithmetic.

B: sequences, T: tokens a sequence (padded on the right), M: tokens in a flat batch, E: hidden size,
H: query heads, K: key/value heads, G: query heads per key/value head, D: head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from umbra.engines.embedded.kv_cache import KvCache
from umbra.engines.embedded.parameters import LayerParameters, LowRank, Parameters
from umbra.runtime.engine_api.decoder_config import ModelConfig, RopeConfig

_MAX_LOGITS: Final = 1 << 25
"""Logits computed at once by `score`. More raise peak memory, fewer make more steps."""


class DecoderModel:
    """Parameters and three passes, both under `torch.inference_mode()`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_context_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.parameters = Parameters(config, dtype, device)
        cosines, sines = rope_tables(
            config.rope, head_dim=config.head_dim, num_positions=max_context_len, dtype=dtype
        )
        self._cosines, self._sines = cosines.to(device), sines.to(device)  # [P, 1, D]

    def score(self, token_ids: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Logprobs [M] float32 of given tokens, at temperature 1, without a cache.

        Args:
            token_ids: [B, T] int64, padded on the right with any token.
            places: [M] int64, positions in the flattened [B * T] that predict the M tokens.
            targets: [M] int64, these tokens.
        """
        hidden = self._run(token_ids, lambda idx, key, value: None).index_select(0, places)
        step = _MAX_LOGITS // self.config.vocab_size
        found: list[Tensor] = []
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            logits = self._logits(hidden[part])
            logprobs = torch.log_softmax(logits, -1, torch.promote_types(logits.dtype, torch.float))
            found.append(logprobs.gather(1, targets[part, None])[:, 0].float())
        return torch.cat(found)

    def prefill(
        self,
        token_ids: Tensor,
        last: Tensor,
        cache: KvCache,
        *,
        first_row: int,
        copies: Tensor | None,
    ) -> Tensor:
        """Runs whole prompts, fills cache rows from `first_row` on, returns each one's last
        logits [B, V].

        Args:
            token_ids: [B, T] int64, padded on the right with any token.
            last: [B] int64, index of each prompt's last token.
            copies: [N] int64, which prompt each row gets (a group shares one), or None for one
                row per prompt in order.
        """
        num_seqs, num_tokens = token_ids.shape
        num_rows = num_seqs if copies is None else len(copies)
        rows = slice(first_row, first_row + num_rows)

        def store(idx: int, key: Tensor, value: Tensor) -> None:
            for cached, fresh in ((cache.keys[idx], key), (cache.values[idx], value)):
                cached[rows, :, :num_tokens] = (
                    fresh if copies is None else fresh.index_select(0, copies)
                )

        hidden = self._run(token_ids, store)
        ends = torch.arange(num_seqs, device=last.device) * num_tokens + last
        return self._logits(hidden.index_select(0, ends))

    def _run(self, token_ids: Tensor, store: Callable[[int, Tensor, Tensor], None]) -> Tensor:
        """Hidden states [B * T, E] of whole sequences, [B, T]. `store` takes the keys and values
        [B, K, T, D] of each layer."""
        num_seqs, num_tokens = token_ids.shape
        positions = torch.arange(num_tokens, device=token_ids.device).repeat(num_seqs)
        rope = self._cosines.index_select(0, positions), self._sines.index_select(0, positions)
        hidden = self._embed(token_ids.flatten())
        for idx, layer in enumerate(self.parameters.layers):
            query, key, value = (
                heads.view(num_seqs, num_tokens, -1, self.config.head_dim).transpose(1, 2)
                for heads in self._project(layer, hidden, rope)
            )
            store(idx, key, value)
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            flat = attended.transpose(1, 2).reshape(num_seqs * num_tokens, -1)
            hidden = self._finish_layer(layer, hidden, flat)
        return hidden

    def decode(self, token_ids: Tensor, positions: Tensor, cache: KvCache, *, span: int) -> Tensor:
        """Runs one token per sequence, sequence i being cache row i; returns logits [B, V].

        Args:
            token_ids: [B] int64.
            positions: [B] int64, each token's index in its sequence, below `span`.
            span: tokens of the longest sequence, this step's included.
        """
        num_seqs, config = len(token_ids), self.config
        num_groups = num_seqs * config.num_kv_heads
        rope = self._cosines.index_select(0, positions), self._sines.index_select(0, positions)
        starts = torch.arange(
            0, num_groups * cache.capacity, cache.capacity, device=positions.device
        )
        slots = (starts.view(num_seqs, -1) + positions[:, None]).flatten()  # [B K]
        mask = self._mask(positions, span)
        scale = config.head_dim**-0.5
        hidden = self._embed(token_ids)
        for idx, layer in enumerate(self.parameters.layers):
            query, key, value = self._project(layer, hidden, rope)
            cache.key_slots[idx].index_copy_(0, slots, key.reshape(num_groups, -1))
            cache.value_slots[idx].index_copy_(0, slots, value.reshape(num_groups, -1))
            keys = cache.key_groups[idx][:num_groups, :span]  # [B K, T, D]
            values = cache.value_groups[idx][:num_groups, :span]
            scores = torch.baddbmm(
                mask,
                query.reshape(num_groups, -1, config.head_dim),
                keys.transpose(1, 2),
                alpha=scale,
            )  # [B K, G, T]
            attended = torch.bmm(torch.softmax(scores, -1), values)
            hidden = self._finish_layer(layer, hidden, attended.view(num_seqs, -1))
        return self._logits(hidden)

    def _mask(self, positions: Tensor, span: int) -> Tensor:
        """[B K, 1, T]: 0 where a sequence has a token, -inf beyond its end."""
        columns = torch.arange(span, device=positions.device)
        mask = torch.zeros(
            (len(positions), span), dtype=self.parameters.dtype, device=positions.device
        )
        mask.masked_fill_(columns > positions[:, None], float("-inf"))
        return mask.repeat_interleave(self.config.num_kv_heads, 0)[:, None]

    def _project(
        self, layer: LayerParameters, hidden: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        normed = self._norm(hidden, layer.input_norm)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        qkv = _changed(qkv, normed, layer.adapters.get("qkv"))
        heads = qkv.view(len(hidden), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            rotated = self._norm(rotated, layer.qk_norm)
        half_turned = rotated.roll(config.head_dim // 2, -1)
        rotated = torch.mul(rotated, rope[0]).addcmul_(half_turned, rope[1])
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value

    def _finish_layer(self, layer: LayerParameters, hidden: Tensor, attended: Tensor) -> Tensor:
        adapters = layer.adapters
        hidden = _add_linear(hidden, attended, layer.output, layer.output_bias)
        hidden = _changed(hidden, attended, adapters.get("output"))
        normed = self._norm(hidden, layer.post_norm)
        gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
        gate, up = _changed(gate_up, normed, adapters.get("gate_up")).chunk(2, -1)
        product = F.silu(gate).mul_(up)
        hidden = _add_linear(hidden, product, layer.down, layer.down_bias)
        return _changed(hidden, product, adapters.get("down"))

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = self.parameters.embedding.index_select(0, token_ids)
        if (adapter := self.parameters.adapters.get("embedding")) is None:
            return hidden
        return torch.addmm(hidden, adapter.second.index_select(0, token_ids), adapter.first)

    def _logits(self, hidden: Tensor) -> Tensor:
        parameters = self.parameters
        normed = self._norm(hidden, parameters.final_norm)
        return _changed(F.linear(normed, parameters.head), normed, parameters.adapters.get("head"))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm over the last dim, in float32 like transformers."""
        if x.dtype == torch.float32 and weight.dim() == 1:
            return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)
        wide = x.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        scaled = wide * torch.rsqrt(variance + self.config.norm_eps)
        return weight * scaled.to(x.dtype)


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.addmm(residual, x, weight.t())
    return residual + F.linear(x, weight, bias)


def _changed(output: Tensor, x: Tensor, adapter: LowRank | None) -> Tensor:
    """With the part of an adapter of the matrix that `x` was multiplied with."""
    if adapter is None:
        return output
    return torch.addmm(output, F.linear(x, adapter.first), adapter.second.t())


def rope_tables(
    config: RopeConfig, *, head_dim: int, num_positions: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rotary position embeddings (Su et al., RoFormer, 2021) as two tables on the CPU: cosines
    [P, 1, D] and signed sines [P, 1, D].

    `x * cos + x.roll(D / 2, -1) * sin` rotates x: the sign of "rotate half" is in the sines. Angles
    are float32 whatever the dtype, as in transformers, so logits agree with a trainer's.

    P: positions, D: head dimension. Heads hold the two halves of each rotated pair D/2 apart, as
    Hugging Face checkpoints do.
    """
    frequencies = _frequencies(config, head_dim)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    cosines = torch.cat((cos, cos), dim=-1)
    sines = torch.cat((-sin, sin), dim=-1)
    return cosines.to(dtype)[:, None].contiguous(), sines.to(dtype)[:, None].contiguous()


def _frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    plain = 1.0 / (config.theta**exponents)
    if config.kind == "default":
        return plain
    if config.kind == "linear":
        return plain / config.factor
    return _llama3_frequencies(config, plain)


def _llama3_frequencies(config: RopeConfig, plain: Tensor) -> Tensor:
    """Llama 3.1: long waves stretched by `factor`, short ones kept, those between blended."""
    context_len = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > context_len / low, plain / config.factor, plain)
    share = (context_len / wavelengths - low) / (high - low)
    blended = (1 - share) * stretched / config.factor + share * stretched
    is_between = ~(wavelengths < context_len / high) & ~(wavelengths > context_len / low)
    return torch.where(is_between, blended, stretched)
