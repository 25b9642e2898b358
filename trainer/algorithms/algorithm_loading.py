from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from umbra.runtime.rollout.user_function import check_call, load_function
from umbra.trainer.algorithms.base import AdvantageEstimator, PolicyLoss
from umbra.trainer.config.algorithm_names import ADVANTAGE_ESTIMATORS, LOSSES, algorithm_target


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
