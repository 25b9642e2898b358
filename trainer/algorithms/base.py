"""The interfaces of advantage estimators and losses, and the data that they exchange. Users name
their own as "module:function" in `train.advantage` and `train.loss`.

G: samples of a group; M: generated tokens of a micro-batch; N: samples of a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from umbra.runtime.rollout.user_function import check_call, load_function
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES, algorithm_target
from umbra.trainer.config.trainer_config import TrainSection

Reduction = Literal["mean", "max", "sum"]


class AdvantageEstimator(Protocol):
    """Turns the rewards of one whole group into advantages; runs on every rank.

    A group may be split over ranks. Each of them calls the estimator with all rewards of the group,
    so equal rewards must give equal advantages everywhere.
    """

    def __call__(self, rewards: NDArray[np.float32], /) -> NDArray[np.float32]:
        """[G] finite advantages, in the order of the [G] rewards. Rewards are finite, and so is the
        difference of any two: their absolute value is below half of the largest float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The tokens of a micro-batch, sample after sample; no tensor here has a gradient."""

    rollout_logprobs: Tensor  # [M] float32, under the policies that sampled the tokens
    # [M] float32, under the policy at the beginning of the step. The current policy differs from
    # the second of `train.mini_batches` or `train.updates_per_batch` on.
    proximal_logprobs: Tensor
    # [M] float32, the same for all tokens of a sample unless they have a KL: `train.kl_in_reward`,
    # `train.teacher_kl_coef`.
    advantages: Tensor
    weights: Tensor  # [M] float32, share of each token in the global loss; 0 in padding
    sample_lens: Tensor  # [N] int64, generated tokens of each sample; sums to M
    # [M] float32 each: all that the batch and the run's models know of the tokens, by name.
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True, slots=True)
class LossMetric:
    """One number to log, from the tokens of all micro-batches and ranks. "mean" weights each token
    as the loss does; "max" is over tokens with weight; "sum" adds up all values."""

    values: Tensor  # [M], a number or a truth value for each token; any shape for "sum"
    reduction: Reduction = "mean"


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The result of a loss for a micro-batch."""

    loss: Tensor  # scalar, with gradient; sums over micro-batches and ranks to the global loss
    # Logged as `train/NAME`. Every micro-batch of every rank must give the same names.
    metrics: Mapping[str, LossMetric]


class PolicyLoss(Protocol):
    """Compares the policy's logprobs with those of older policies; runs once per micro-batch.

    umbra's losses have no gradient where the advantage is 0, so their training leaves out samples
    of advantage 0 while there is no KL term or entropy bonus. A user's own loss gets all samples.
    """

    def __call__(
        self, logprobs: Tensor, inputs: LossInputs, settings: TrainSection, /
    ) -> LossOutput:
        """`logprobs`, [M], are the tokens' under the policy, with gradient. `settings` is the
        section `[train]` of the config."""
        ...


def load_loss(name: str, folders: Sequence[str] = ()) -> PolicyLoss:
    """The loss that `train.loss` names. A user's module is searched for in `folders`
    before Python's own path. Raises ConfigError if it cannot be imported or does not take
    a loss's arguments."""
    return _load("train.loss", name, LOSSES, ("logprobs", "inputs", "settings"), folders)


def load_advantage_estimator(name: str, folders: Sequence[str] = ()) -> AdvantageEstimator:
    """The estimator that `train.advantage` names; see `load_loss`."""
    return _load("train.advantage", name, ADVANTAGE_ESTIMATORS, ("rewards",), folders)


def _load(
    setting: str,
    name: str,
    registered: Mapping[str, str],
    arguments: Sequence[str],
    folders: Sequence[str],
) -> Callable[..., Any]:
    if name not in registered:
        sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    function = load_function(algorithm_target(name, registered), setting)
    check_call(function, f"{setting} {name!r}", positional=arguments, keywords=[])
    return function
