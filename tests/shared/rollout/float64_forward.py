"""A Qwen3 forward pass in float64 throughout, independent of the engine, as the reference.

B: sequences, T: tokens (padded on the right), V: vocabulary, H: query heads, K: key/value heads,
D: head dimension.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

_ROUNDINGS_PER_LAYER: Final = 14
"""Norm, projection, norm of heads, rotation, scores, softmax, mixing, output, residual; norm,
projection, gate, output, residual."""
_UNIT_ROUNDOFF: Final = 2.0**-24


class Float64Model:
    """The model of a Hugging Face directory; its float32 weights are exact in float64."""

    def __init__(self, folder: Path) -> None:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
        rope: dict[str, Any] = settings.get("rope_parameters") or settings
        self.num_layers: int = settings["num_hidden_layers"]
        self._num_heads: int = settings["num_attention_heads"]
        self._num_kv_heads: int = settings["num_key_value_heads"]
        self._head_dim: int = settings["head_dim"]
        self._eps: float = settings["rms_norm_eps"]
        self._theta: float = rope["rope_theta"]
        tensors = load_file(str(folder / "model.safetensors"))
        self._weights = {name: tensor.double() for name, tensor in tensors.items()}
        self._head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits after each token [B, T, V], and how far float32 may be off there [B, T].

        How far: a float32 operation is off by about a unit roundoff of what it adds up in
        absolute terms, and all but the last one's errors reach the logits through the head, that
        is, weighed by |W| |x|. So: roundings on the way * 2^-24 * max over V of |W| |x|.
        An estimate, not a worst case (which would be of no use): to be held against measurement.
        """
        x = self._weights["model.embed_tokens.weight"][tokens]
        rope = self._rope(tokens.shape[1])
        for idx in range(self.num_layers):
            x = x + self._attention(f"model.layers.{idx}", x, rope)
            x = x + self._mlp(f"model.layers.{idx}", x)
        x = self._norm("model.norm.weight", x)
        num_roundings = _ROUNDINGS_PER_LAYER * self.num_layers + 2
        scale = (x.abs() @ self._head.abs().t()).amax(-1)
        return x @ self._head.t(), num_roundings * _UNIT_ROUNDOFF * scale

    def _attention(self, layer: str, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        name, normed = f"{layer}.self_attn", self._norm(f"{layer}.input_layernorm.weight", x)
        query = self._heads(f"{name}.q_proj.weight", normed, self._num_heads)
        key = self._heads(f"{name}.k_proj.weight", normed, self._num_kv_heads)
        value = self._heads(f"{name}.v_proj.weight", normed, self._num_kv_heads)
        query = _rotate(self._norm(f"{name}.q_norm.weight", query), rope)
        key = _rotate(self._norm(f"{name}.k_norm.weight", key), rope)
        num_shares = self._num_heads // self._num_kv_heads
        key, value = (each.repeat_interleave(num_shares, 1) for each in (key, value))
        scores = query @ key.transpose(2, 3) * self._head_dim**-0.5  # [B, H, T, T]
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = torch.softmax(scores.masked_fill(ahead, float("-inf")), -1) @ value
        return mixed.transpose(1, 2).flatten(2) @ self._weights[f"{name}.o_proj.weight"].t()

    def _heads(self, name: str, x: Tensor, num_heads: int) -> Tensor:
        """[B, heads, T, D]"""
        projected = x @ self._weights[name].t()
        return projected.view(*x.shape[:2], num_heads, self._head_dim).transpose(1, 2)

    def _mlp(self, layer: str, x: Tensor) -> Tensor:
        normed = self._norm(f"{layer}.post_attention_layernorm.weight", x)
        gate, up, down = (
            self._weights[f"{layer}.mlp.{name}_proj.weight"].t() for name in ("gate", "up", "down")
        )
        return (F.silu(normed @ gate) * (normed @ up)) @ down

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self._weights[name] * x * torch.rsqrt(x.pow(2).mean(-1, True) + self._eps)

    def _rope(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D]; angles are float32, as they are part of the model."""
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
        angles = torch.arange(num_tokens).float()[:, None] * (1.0 / self._theta**exponents)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().double(), angles.sin().double()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat((-second, first), -1) * rope[1]
