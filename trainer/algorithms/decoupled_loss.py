"""The clipped surrogate around the proximal policy, for tokens of older policies.

Three policies matter if tokens are older than the weights being trained: the behaviour policy
sampled a token, the proximal policy is the one at the beginning of the step, and the current policy
is being optimised. Clipping keeps the current policy near an anchor. With the behaviour policy as
the anchor ("clipped"), old tokens may be clipped before the first update. With the proximal policy
("decoupled"), their age only changes an importance weight.

| setting | source |
|---|---|
| decoupled objective | Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.2 |
| importance weights, "truncate" | TIS, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" |
| importance weights, "mask", floor | IcePop, Ling Team 2025, arXiv:2510.18855: weights outside of a range count as 0 |

M: generated tokens of a micro-batch.
"""  # noqa: E501

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from umbra.trainer.algorithms.base import LossInputs, LossMetric, LossOutput
from umbra.trainer.algorithms.clipped_loss import clipped_surrogate
from umbra.trainer.config.trainer_config import TrainSection


def decoupled_loss(logprobs: Tensor, inputs: LossInputs, settings: TrainSection) -> LossOutput:
    """See `PolicyLoss`.

    Each token is weighted by proximal / behaviour, an importance weight without gradient. It makes
    the tokens represent tokens that the proximal policy would have sampled. If the two policies are
    equal, this is `clipped_loss`.

    Metrics: those of `clipped_loss`; `importance_mean` of the limited weights,
    `importance_limited_share` of tokens, and `importance_max` before the limits.
    """
    terms = clipped_surrogate(logprobs - inputs.proximal_logprobs, inputs.advantages, settings)
    raw = (inputs.proximal_logprobs - inputs.rollout_logprobs).exp()
    importance = limit_importance(raw, settings)
    loss = -(inputs.weights * importance * terms.objective).sum()
    metrics = {
        "importance_mean": LossMetric(importance),
        "importance_limited_share": LossMetric(importance != raw),
        "importance_max": LossMetric(raw, "max"),
    }
    return LossOutput(loss, terms.metrics() | metrics)


def limit_importance(raw: Tensor, settings: TrainSection) -> Tensor:
    """Limits importance weights as the settings say: [M], from [M] probability ratios.

    Tokens whose weight becomes 0 still count where a loss is divided by the number of tokens.
    """
    match settings.importance_above_cap:
        case "truncate":
            limited = raw.clamp(max=settings.importance_cap)
        case "mask":
            limited = torch.where(raw > settings.importance_cap, 0.0, raw)
        case _:
            assert_never(settings.importance_above_cap)
    return torch.where(raw < settings.importance_floor, 0.0, limited)
