"""The names of losses and advantage estimators. Imports neither the algorithms nor torch, because
the config is checked against the names before anything is loaded."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Final

_FOLDER: Final = "umbra.trainer.algorithms"

LOSSES: Final[Mapping[str, str]] = {
    "clipped": f"{_FOLDER}.losses:clipped_loss",
    "decoupled": f"{_FOLDER}.losses:decoupled_loss",
    "gspo": f"{_FOLDER}.losses:gspo_loss",
    "cispo": f"{_FOLDER}.losses:cispo_loss",
    "sapo": f"{_FOLDER}.losses:sapo_loss",
    "dppo": f"{_FOLDER}.losses:dppo_loss",
}
"""Values of `train.loss`; "module:function" names a user's own `PolicyLoss`."""

LOSS_ARGS: Final[Mapping[str, Mapping[str, float]]] = {
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
}
"""Keys of `train.loss_args` that umbra's losses take, with defaults; all are above 0."""

ADVANTAGE_ESTIMATORS: Final[Mapping[str, str]] = {
    "grpo": f"{_FOLDER}.advantages:grpo_advantages",
    "dr_grpo": f"{_FOLDER}.advantages:dr_grpo_advantages",
    "rloo": f"{_FOLDER}.advantages:rloo_advantages",
    "maxrl": f"{_FOLDER}.advantages:maxrl_advantages",
    "reinforce": f"{_FOLDER}.advantages:reinforce_advantages",
    "gdpo": f"{_FOLDER}.advantages:grpo_advantages",  # of each part of the rewards
    "gae": f"{_FOLDER}.advantages:reinforce_advantages",  # until a critic's values are known
    "none": f"{_FOLDER}.advantages:no_advantages",
}
"""Values of `train.advantage`; "module:function" names a user's own `AdvantageEstimator`."""

GROUP_ADVANTAGES: Final = ("grpo", "dr_grpo", "rloo", "maxrl", "gdpo")
"""Estimators that compare the completions of one prompt: equal rewards teach nothing."""

TOKEN_ADVANTAGES: Final[Mapping[str, str]] = {"gae": "umbra.trainer.critic:add_gae"}
"""Estimators with an advantage for each token: before a step, a function like `add_gae` makes these
from the samples' advantages, and applies `train.advantage_norm` and `kl_in_reward`."""


def takes_args(loss: str, args: Mapping[str, Any]) -> bool:
    """Whether one of umbra's losses takes these `train.loss_args`."""
    known = LOSS_ARGS.get(loss, {})
    return all(
        name in known and type(value) in (int, float) and 0 < value < math.inf
        for name, value in args.items()
    )


def algorithm_target(name: str, registered: Mapping[str, str]) -> str:
    """The `module:function` that a setting stands for; the setting may be one itself."""
    return registered.get(name, name)


def unknown_algorithm(kind: str, name: str, registered: Mapping[str, str]) -> str:
    """The message for a name that is not registered, with the registered ones; `kind` is
    "loss" or the like."""
    close = difflib.get_close_matches(name, registered, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    names = ", ".join(map(repr, registered))
    return f"there is no {kind} {name!r}{hint} Use {names} or the 'module:function' of your own"
