"""Which transport the weights of a sync take: the first that can be used. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.transports.base import (
    ProbedEngine,
    Problem,
    TransportName,
    TransportPlan,
)
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import Offer

logger = logging.getLogger(__name__)

TransportSetting = Literal["auto", "memfd", "cuda_ipc"]


class TransportChooser:
    """Chooses once for each sync of one pool.

    Args:
        plans: of all transports, the fastest first; the last one works everywhere.
        setting: "auto" tries them in this order; else that one alone.
    """

    def __init__(
        self, pool: str, setting: TransportSetting, plans: Sequence[TransportPlan]
    ) -> None:
        self._pool = pool
        self._setting = setting
        self._plans = [plan for plan in plans if setting in ("auto", plan.name)]
        self._logged: tuple[TransportName, str] | None = None

    async def choose(
        self, offers: Sequence[Offer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> TransportPlan:
        """
        Args:
            offers: of all ranks.
            engines: those that may take part.

        Raises:
            WeightSyncError: the one that is set cannot be used.
        """
        faster: Problem | None = None
        for plan in self._plans:
            problem = await plan.find_problem(offers, engines, timeout_s)
            if problem is None:
                self._log(plan.name, faster)
                return plan
            faster = problem
        assert faster is not None
        raise WeightSyncError(
            f"pool {self._pool}: transport {self._setting!r} cannot be had: {faster.text}; "
            "'auto' would send these weights through host memory"
        )

    def _log(self, name: TransportName, faster: Problem | None) -> None:
        """Logs the choice where it is another one than before."""
        reason = "all ranks and engines can" if faster is None else faster.text
        if self._setting == name:
            reason = "it is set"
        if self._logged == (name, reason):
            return
        self._logged = name, reason
        is_warning = faster is not None and faster.is_warning
        level = logging.WARNING if is_warning else logging.INFO
        logger.log(level, "pool %s: weights travel by %s: %s", self._pool, name, reason)
