"""Log-probabilities of tokens from hidden states, without computing all logits at once.

M: tokens to score; C: tokens of a chunk; E: hidden size; V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, assert_never, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from umbra.runtime.engine_api.kept_tokens import (
    MAX_SORTED_LOGITS,
    SORTED_NBYTES,
    WHOLE,
    Truncation,
    lowest_kept,
)
from umbra.trainer.model.compiling import CompiledFunction
from umbra.trainer.model.lora_layers import LoraLinear

# This many logits are computed and scored at a time. Lower adds up the head's gradient from more
# parts, bound by memory bandwidth; higher takes memory.
_MAX_CHUNK_LOGITS: Final = 1 << 28


EntropyUse = Literal["none", "measured", "trained"]
"""Entropies are not computed, have no gradient, or have one."""


def score_hidden(
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_use: EntropyUse,
    *,
    truncation: Truncation = WHOLE,
    compiles: bool = False,
    keeps_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """[M] log-probabilities of `targets`, and [M] entropies, or [0] with "none".

    `hidden` is [M, E]. Only the target and the tokens that `truncation` keeps have a probability.
    torch.compile (`compiles`) makes fewer passes over the logits. Those of more than one chunk are
    computed twice, unless `keeps_logits`, with the same results.
    """
    chunk_len = max(1, _MAX_CHUNK_LOGITS // head.weight.shape[0])
    untyped: Any = _ChunkedScores
    bias = cast("Tensor | None", head.bias)
    is_adapted = isinstance(head, LoraLinear)
    inputs, weight = head.widened(hidden) if is_adapted else (hidden, head.weight)
    scores: Any = untyped.apply(
        inputs,
        weight,
        bias,
        targets,
        temperature,
        entropy_use,
        truncation,
        chunk_len,
        compiles,
        keeps_logits or len(targets) <= chunk_len,
    )
    return cast("tuple[Tensor, Tensor]", scores)


def scoring_nbytes(
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    itemsize: int,
    truncation: Truncation,
    *,
    trains_entropy: bool,
    is_chunked: bool = True,
) -> int:
    """Most memory that `score_hidden` takes with its gradient and the hidden states, or without
    chunks `score_logits`. `itemsize` is that of hidden states and head."""
    num_logits = num_tokens * vocab_size
    wide = max(4, itemsize)
    hidden = 2 * itemsize * num_tokens * hidden_size  # with their gradient
    if truncation.is_whole:
        sorting = masked = 0
    else:
        sorting = min(num_logits, MAX_SORTED_LOGITS) * SORTED_NBYTES
        masked = wide + 1  # the logits without the tokens left out, and which these are
    # Logits, their float32 copy and log-probabilities, or what the entropy makes of these; the
    # head's gradient.
    num_wide = 3 if trains_entropy else 2
    chunk = min(num_logits, _MAX_CHUNK_LOGITS) * (itemsize + num_wide * wide + masked)
    if not is_chunked:  # log-probabilities, and gradients of them and of the logits
        chunk = num_logits * ((5 if trains_entropy else 3) * wide + masked)
    return chunk + sorting + hidden + vocab_size * hidden_size * wide


def kept_logits_nbytes(num_tokens: int, vocab_size: int, itemsize: int) -> int:
    """How much more it takes with `keeps_logits`."""
    return max(0, num_tokens * vocab_size - _MAX_CHUNK_LOGITS) * itemsize


def score_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_use: EntropyUse,
    truncation: Truncation = WHOLE,
) -> tuple[Tensor, Tensor]:
    """Like `score_hidden`, from [M, V] logits."""
    lowest = _lowest_kept(logits, targets, temperature, truncation)
    return _score(logits, targets, temperature, entropy_use, lowest)


def _lowest_kept(
    logits: Tensor, targets: Tensor, temperature: float, truncation: Truncation
) -> Tensor | None:
    """[C, 1] the lowest logits with a probability; None if all have one.

    Rounding, or a later update, may leave the target out of what the engine kept. The target and
    more probable tokens then still have a probability.
    """
    if truncation.is_whole:
        return None
    logits = logits.detach()
    temperatures = torch.full_like(targets, temperature, dtype=torch.float64).unsqueeze(1)
    lowest = lowest_kept(logits, temperatures, truncation)
    return torch.minimum(lowest, logits.gather(1, targets.unsqueeze(1)))


def _score(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_use: EntropyUse,
    lowest: Tensor | None,
) -> tuple[Tensor, Tensor]:
    every = _log_softmax(logits, temperature, lowest)
    logprobs = -F.nll_loss(every, targets, reduction="none")
    match entropy_use:
        case "none":
            entropy = every.new_empty(0)
        case "measured":
            with torch.no_grad():
                entropy = every.exp().mul_(every).sum(-1).neg_()
        case "trained":
            entropy = -(every.exp() * every).sum(-1)
        case _:
            assert_never(entropy_use)
    return logprobs, entropy


def _log_softmax(logits: Tensor, temperature: float, lowest: Tensor | None) -> Tensor:
    """[C, V] in at least float32; tokens below `lowest` have no probability."""
    left_out = None if lowest is None else logits < lowest
    if logits.dtype.itemsize < torch.float32.itemsize:
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if left_out is not None:
        # Finite, so that their part of the entropy is 0.
        logits = logits.masked_fill(left_out, torch.finfo(logits.dtype).min)
    return logits.log_softmax(-1)


class _ChunkedScores(torch.autograd.Function):
    """`score_logits(F.linear(hidden, weight, bias), ...)`, for C tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_use: EntropyUse,
        truncation: Truncation,
        chunk_len: int,
        compiles: bool,
        keeps_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.chunk_len, ctx.compiles = temperature, chunk_len, compiles
        ctx.trains_entropy = entropy_use == "trained"
        score = _compiled(_score) if compiles else _score
        scores: list[tuple[Tensor, Tensor]] = []
        lowest: list[Tensor] = []
        every: list[Tensor] = []
        for part, part_targets in zip(
            torch.split(hidden, chunk_len), torch.split(targets, chunk_len), strict=True
        ):
            logits = F.linear(part, weight, bias)
            kept = _lowest_kept(logits, part_targets, temperature, truncation)
            lowest += [] if kept is None else [kept]
            scores.append(score(logits, part_targets, temperature, entropy_use, kept))
            every += [logits] if keeps_logits else []
            del logits  # before the next
        cut = torch.cat(lowest) if lowest else None
        ctx.save_for_backward(hidden, weight, bias, targets, cut, *every)
        entropy = torch.cat([score[1] for score in scores])
        if not ctx.trains_entropy:
            ctx.mark_non_differentiable(entropy)
        return torch.cat([score[0] for score in scores]), entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lowest, *every = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # Adding parts that are each rounded to half precision would lose digits.
        total = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=total) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=total) if wants_bias else None
        derive = _compiled(_logit_gradient) if ctx.compiles else _logit_gradient
        for start in range(0, len(targets), ctx.chunk_len):
            chunk = slice(start, start + ctx.chunk_len)
            part = hidden[chunk]
            logits = every.pop(0) if every else F.linear(part, weight, bias)
            kept = None if lowest is None else lowest[chunk]
            of_entropy = gradients[1][chunk] if ctx.trains_entropy else None
            of_logits = derive(
                logits, targets[chunk], gradients[0][chunk], of_entropy, ctx.temperature, kept
            )
            del logits
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[chunk])
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), part)
            if of_bias is not None:
                of_bias += of_logits.sum(0)
            del of_logits  # before the next
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(weight.dtype),
            None, None, None, None, None, None, None,
        )  # fmt: skip


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    of_logprobs: Tensor,
    of_entropy: Tensor | None,
    temperature: float,
    lowest: Tensor | None,
) -> Tensor:
    """[C, V], in the dtype of `logits`, from the gradients of log-probabilities and entropies, [C].

    With p = softmax and the entropy H, it is (one-hot - p) of_logprobs / temperature
    - p (log p + H) of_entropy / temperature.
    """
    every = _log_softmax(logits, temperature, lowest)
    targets_column, scale = targets.unsqueeze(1), (of_logprobs / temperature).unsqueeze(1)
    of_targets = every.gather(1, targets_column).expm1() * -scale  # 1 - p, without rounding p first
    if of_entropy is None:
        of_logits = every.exp_().mul_(-scale)
    else:
        shares = every.exp()
        entropy = -(shares * every).sum(-1, keepdim=True)
        bonus = every.add_(entropy).mul_(shares).mul_((of_entropy / -temperature).unsqueeze(1))
        of_targets = of_targets + bonus.gather(1, targets_column)
        of_logits = bonus.sub_(shares.mul_(scale))
    return of_logits.to(logits.dtype).scatter_(1, targets_column, of_targets.to(logits.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left` @ `right` to `total`, which may have twice their precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return CompiledFunction(function)
