"""The losses of `train.loss`. M: generated tokens of a micro-batch; N: its samples."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from umbra.trainer.algorithms.advantages import sums_to_go
from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput
from umbra.trainer.config.algorithm_names import LOSS_ARGS
from umbra.trainer.config.trainer_config import TrainSection

KlEstimator = Literal["k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]

_MAX_LOG_RATIO: Final = 20.0
"""The product over a long sample would exceed float32."""
_MAX_RATIO: Final = 20.0
"""Without it, a token whose probability rises from 1e-5 to 0.1 would outweigh a whole batch."""


def clipped_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """PPO's clipped surrogate: the ratio to the policies that sampled the tokens, clipped.

    | setting | source |
    |---|---|
    | clipped ratio | PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7 |
    | `clip_eps_high` above `clip_eps_low` | DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |

    Metrics: `ratio_mean`, and `clipped_share` of tokens whose gradient the clip removed.
    """
    terms = clipped_surrogate(logprobs - inputs.rollout_logprobs, inputs.advantages, settings)
    loss = -(inputs.weights * terms.objective).sum()
    return LossOutput(loss, terms.metrics())


def decoupled_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """The clipped surrogate around the proximal policy, for tokens of older policies.

    Three policies matter if tokens are older than the weights being trained: the behaviour policy
    sampled a token, the proximal policy is the one at the beginning of the step, and the current
    policy is being optimised. Clipping keeps the current policy near an anchor. With the behaviour
    policy as the anchor ("clipped"), old tokens may be clipped before the first update. With the
    proximal policy ("decoupled"), their age only changes an importance weight.

    | setting | source |
    |---|---|
    | decoupled objective | Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.2 |
    | importance weights, "truncate" | TIS, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" |
    | importance weights, "mask", floor | IcePop, Ling Team 2025, arXiv:2510.18855: weights outside of a range count as 0 |
    | "sequence", "geometric" | Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" |

    Each token is weighted by proximal / behaviour, an importance weight without gradient, so that
    tokens represent the ones that the proximal policy would have sampled; see
    `importance_ratios`. Metrics: those of
    `clipped_loss`; `importance_mean` of the limited weights, `importance_limited_share` of tokens,
    and `importance_max` before the limits.
    """  # noqa: E501
    terms = clipped_surrogate(logprobs - inputs.proximal_logprobs, inputs.advantages, settings)
    raw = importance_ratios(inputs, settings)
    importance = limit_importance(raw, settings)
    loss = -(inputs.weights * importance * terms.objective).sum()
    metrics = {
        "importance_mean": LossMetric(importance),
        "importance_limited_share": LossMetric(importance != raw),
        "importance_max": LossMetric(raw, "max"),
    }
    return LossOutput(loss, terms.metrics() | metrics)


def gspo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """Group Sequence Policy Optimization, Zheng et al. 2025, arXiv:2507.18071.

    The ratio is a whole sample's, to the power of 1 / length, and is clipped per sample. With
    `train.loss_aggregation = "sequence"` and group advantages this is eq. 5 to 7. Such a ratio
    stays much closer to 1 than a token's: the paper clips at 3e-4 below and 4e-4 above.
    Metrics: `ratio_mean` of the samples' ratios, and `clipped_share` of tokens in samples whose
    gradient the clip removed.
    """
    lens = inputs.sample_lens
    of_tokens = _over_samples(logprobs - inputs.rollout_logprobs, "mean", lens)  # eq. 7
    terms = clipped_surrogate(of_tokens, inputs.advantages, settings)
    loss = -(inputs.weights * terms.objective).sum()
    return LossOutput(loss, terms.metrics())


def cispo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """CISPO, clipped importance sampling: MiniMax-M1, MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.

    The clip limits a token's importance weight but never removes its gradient, so that rare
    important tokens count. The paper has no lower bound (`train.clip_eps_low = 1`) and weights
    every token equally (`train.loss_aggregation = "token"`). Metrics: `ratio_mean` before the clip,
    `clipped_share` of tokens whose ratio was clipped.
    """
    ratio = (logprobs.detach() - inputs.rollout_logprobs).exp()
    clipped = ratio.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high)
    loss = -(inputs.weights * clipped * inputs.advantages * logprobs).sum()
    metrics = {"clipped_share": LossMetric(clipped != ratio), "ratio_mean": LossMetric(ratio)}
    return LossOutput(loss, metrics)


def sapo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """Soft Adaptive Policy Optimization, Gao et al. 2025, arXiv:2511.20347.

    A sigmoid of the ratio takes the clip's place: sigmoid(tau (ratio - 1)) 4 / tau, whose slope is
    1 at a ratio of 1 and falls to both sides. tau is `tau_positive` for positive advantages and
    `tau_negative` for the others, of `train.loss_args`. Metrics: `ratio_mean`, and `gate_mean` of
    the slopes, 1 where the ratio is 1.
    """
    taus = {**LOSS_ARGS["sapo"], **settings.loss_args}
    ratio = (logprobs - inputs.rollout_logprobs).exp()
    tau = torch.where(inputs.advantages > 0, taus["tau_positive"], taus["tau_negative"])
    gate = torch.sigmoid(tau * (ratio - 1.0))
    loss = -(inputs.weights * 4.0 / tau * gate * inputs.advantages).sum()
    slope = (4.0 * gate * (1.0 - gate)).detach()
    metrics = {"ratio_mean": LossMetric(ratio.detach()), "gate_mean": LossMetric(slope)}
    return LossOutput(loss, metrics)


def dppo_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """Divergence PPO with the binary total variation, Qi et al. 2026, arXiv:2602.04879.

    A token leaves the loss where its probability has moved too far from the one that it was sampled
    with, and would move on: up by more than `train.clip_eps_high` with a positive advantage, down
    by more than `train.clip_eps_low` with another. PPO's bound on the ratio stops rare tokens
    early and frequent ones late. A token's importance weight, the ratio without gradient, is at
    most 20. Metrics: `ratio_mean`, and `clipped_share` of tokens left out.
    """
    ratio = (logprobs.detach() - inputs.rollout_logprobs).exp()
    moved = (logprobs.detach().exp() - inputs.rollout_logprobs.exp()).float()
    is_left_out = torch.where(
        inputs.advantages > 0, moved > settings.clip_eps_high, moved < -settings.clip_eps_low
    )
    importance = torch.where(is_left_out, 0.0, ratio.clamp(max=_MAX_RATIO))
    loss = -(inputs.weights * importance * inputs.advantages * logprobs).sum()
    metrics = {"clipped_share": LossMetric(is_left_out), "ratio_mean": LossMetric(ratio)}
    return LossOutput(loss, metrics)


class ClippedSurrogate(NamedTuple):
    """PPO's surrogate of each token, to be maximised; all are [M]."""

    objective: Tensor
    ratio: Tensor
    is_clipped: Tensor

    def metrics(self) -> dict[str, LossMetric]:
        return {
            "clipped_share": LossMetric(self.is_clipped),
            "ratio_mean": LossMetric(self.ratio),
        }


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, settings: TrainSection
) -> ClippedSurrogate:
    """`log_ratio`, [M], has the gradient. `train.dual_clip` is that of Ye et al. 2020,
    arXiv:1912.09729."""
    ratio = log_ratio.exp()
    free = ratio * advantages
    bounded = ratio.clamp(1.0 - settings.clip_eps_low, 1.0 + settings.clip_eps_high) * advantages
    objective, is_clipped = torch.minimum(free, bounded), bounded < free
    if settings.dual_clip:
        floor = settings.dual_clip * advantages
        is_below = (advantages < 0) & (objective < floor)
        objective, is_clipped = torch.where(is_below, floor, objective), is_clipped | is_below
    return ClippedSurrogate(objective, ratio, is_clipped)


def importance_ratios(inputs: LossInputs, settings: TrainSection) -> Tensor:
    """[M] proximal / behaviour: of each token; of its whole sample, as the product ("sequence") or
    the geometric mean of its tokens; or 1 ("none")."""
    log_ratio = inputs.proximal_logprobs - inputs.rollout_logprobs
    match settings.importance_level:
        case "token":
            pass
        case "sequence":
            log_ratio = _over_samples(log_ratio, "sum", inputs.sample_lens)
        case "geometric":
            log_ratio = _over_samples(log_ratio, "mean", inputs.sample_lens)
        case "none":
            log_ratio = torch.zeros_like(log_ratio)
        case _:
            assert_never(settings.importance_level)
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def _over_samples(values: Tensor, reduction: Literal["sum", "mean"], lens: Tensor) -> Tensor:
    """[M], each token's being that of its sample."""
    # `unsafe`: to check the lengths, the host would wait for the GPU.
    reduced = torch.segment_reduce(values, reduction, lengths=lens, initial=0.0, unsafe=True)
    return torch.repeat_interleave(reduced, lens, output_size=len(values))


def limit_importance(raw: Tensor, settings: TrainSection) -> Tensor:
    """[M] limited importance weights, from [M] probability ratios. Tokens whose weight becomes 0
    still count where a loss is divided by the number of tokens."""
    match settings.importance_above_cap:
        case "truncate":
            limited = raw.clamp(max=settings.importance_cap)
        case "mask":
            limited = torch.where(raw > settings.importance_cap, 0.0, raw)
        case _:
            assert_never(settings.importance_above_cap)
    return torch.where(raw < settings.importance_floor, 0.0, limited)


def kl_terms(logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimates of KL(policy || reference) from tokens of the policy: [M].

    With log_ratio = log p_ref - log p: k2 = log_ratio^2 / 2 (biased, but its gradient is the KL's),
    k3 = exp(log_ratio) - 1 - log_ratio (unbiased, never negative). k1 = -log_ratio is no loss: its
    expected gradient is zero. In the reward it is the one to take; see `kl_to_go`.
    """
    log_ratio = reference_logprobs - logprobs
    match estimator:
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            return log_ratio.exp() - 1.0 - log_ratio
        case _:
            assert_never(estimator)


def kl_to_go(logprobs: Tensor, reference_logprobs: Tensor, sample_lens: Tensor) -> Tensor:
    """[M] sums of log p - log p_ref (k1) over a token and the later ones of its sample: the KL that
    the token is responsible for. REINFORCE++, Hu et al. 2025, arXiv:2501.03262."""
    terms = logprobs - reference_logprobs
    return sums_to_go(terms, sample_lens).to(logprobs.dtype)


def token_weights(
    sample_lens: Tensor,
    aggregation: Aggregation,
    *,
    num_tokens_global: int,
    num_samples_global: int,
    max_new_tokens: int,
) -> Tensor:
    """[M] float32, each token's weight in the global loss; `sample_lens`, [N] int64, sums to M.

    | setting | source |
    |---|---|
    | "sequence" | GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 3 |
    | "token" | DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 8 |
    | "constant" | Dr. GRPO, Liu et al. 2025, arXiv:2503.20783: no division by length |

    "token": all tokens of the global batch weigh the same, so long samples weigh more.
    "sequence": all samples weigh the same; the tokens of one share its weight.
    "constant": divides by the token budget, which favours neither; the sum depends on lengths.
    """
    match aggregation:
        case "token":
            per_sample = torch.full_like(sample_lens, 1.0 / num_tokens_global, dtype=torch.float32)
        case "sequence":
            per_sample = 1.0 / (num_samples_global * sample_lens.float())
        case "constant":
            share = 1.0 / (num_samples_global * max_new_tokens)
            per_sample = torch.full_like(sample_lens, share, dtype=torch.float32)
        case _:
            assert_never(aggregation)
    return torch.repeat_interleave(per_sample, sample_lens)
