"""Chooses the transport of a sync: the first one that can be used. Torch-free."""

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

TransportSetting = Literal["auto", "memfd", "cuda_ipc", "nccl"]


class TransportChooser:
    """Chooses once for each sync of one pool.

    Args:
        plans: of all transports, the fastest first.
        setting: "auto" tries them in this order; else only that one may be used.
    """

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
        """
        Args:
            offers: of all ranks.
            engines: engines that may take part.

        Raises:
            WeightSyncError: the configured transport cannot be used.
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
            f"pool {self._pool}: transport {self._setting!r} is unavailable: {faster.text}. "
            "Set pool.transport = 'auto' to use any that works."
        )

    def _log(self, name: TransportName, faster: Problem | None) -> None:
        """Logs the choice if it differs from the last one."""
        reason = "all ranks and engines can" if faster is None else faster.text
        if self._setting == name:
            reason = "pool.transport sets it"
        if self._logged == (name, reason):
            return
        self._logged = name, reason
        is_warning = faster is not None and faster.is_warning
        level = logging.WARNING if is_warning else logging.INFO
        logger.log(level, "pool %s: weights travel by %s: %s", self._pool, name, reason)
