"""The names of losses and advantage estimators. Imports neither the algorithms nor torch, because
the config is checked against the names before anything is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

_FOLDER: Final = "umbra.trainer.algorithms"

LOSSES: Final[Mapping[str, str]] = {
    "clipped": f"{_FOLDER}.losses:clipped_loss",
    "decoupled": f"{_FOLDER}.losses:decoupled_loss",
    "gspo": f"{_FOLDER}.losses:gspo_loss",
    "cispo": f"{_FOLDER}.losses:cispo_loss",
}
"""Values of `train.loss`; "module:function" names a user's own `PolicyLoss`."""

ADVANTAGE_ESTIMATORS: Final[Mapping[str, str]] = {
    "grpo": f"{_FOLDER}.advantages:grpo_advantages",
    "dr_grpo": f"{_FOLDER}.advantages:dr_grpo_advantages",
}
"""Values of `train.advantage`; "module:function" names a user's own `AdvantageEstimator`."""


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
