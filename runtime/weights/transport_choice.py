from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.base import (
    ProbedEngine,
    Problem,
    RankOffer,
    TransportName,
    TransportPlan,
)

logger = logging.getLogger(__name__)

TransportSetting = Literal["auto", "memfd", "cuda_ipc", "tcp"]


class TransportChooser:
    """Chooses the transport of each sync of one pool: the first of `plans`, fastest first, that can
    be used. Any `setting` but "auto" allows only that transport."""

    def __init__(
        self, pool: str, setting: TransportSetting, plans: Sequence[TransportPlan]
    ) -> None:
        self._pool = pool
        self._setting = setting
        self._plans = [plan for plan in plans if setting in ("auto", plan.name)]
        self._logged: tuple[TransportName, str] | None = None

    async def choose(
        self, offers: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> TransportPlan:
        """Raises WeightSyncError if no allowed transport can be used."""
        problems: list[Problem] = []
        for plan in self._plans:
            problem = await plan.find_problem(offers, engines, timeout_s)
            if problem is None:
                self._log(plan.name, problems)
                return plan
            problems.append(problem)
        others = "Set pool.transport = 'auto' to use any that works."
        raise WeightSyncError(
            f"pool {self._pool}: transport {self._setting!r} is unavailable: {_reasons(problems)}."
            + ("" if self._setting == "auto" else f" {others}")
        )

    def _log(self, name: TransportName, problems: Sequence[Problem]) -> None:
        """Logs a choice that differs from the last one, with the problems of faster transports."""
        reason = _reasons(problems) if problems else "all ranks and engines can"
        if self._setting == name:
            reason = "pool.transport sets it"
        if self._logged == (name, reason):
            return
        self._logged = name, reason
        level = logging.WARNING if any(p.is_warning for p in problems) else logging.INFO
        logger.log(level, "pool %s: weights travel by %s: %s", self._pool, name, reason)


def _reasons(problems: Sequence[Problem]) -> str:
    return "; ".join(dict.fromkeys(problem.text for problem in problems))
