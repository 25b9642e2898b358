"""How the weights of a sync travel: through buckets in host memory, or read from the ranks' GPUs.

Chosen once for every sync: by CUDA IPC where every rank exports its memory and every engine has
opened some of it, as it proves beforehand; else by memfd, which works everywhere. Torch-free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal

from umbra.runtime.errors import UmbraError, WeightSyncError
from umbra.runtime.weights.engine_sync import SyncEngine
from umbra.runtime.weights.transports.cuda_ipc.rank_exports import (
    Allocation,
    Offer,
    RankExports,
    probe_allocations,
)

logger = logging.getLogger(__name__)

TransportSetting = Literal["auto", "memfd", "cuda_ipc"]
TRANSPORT_SETTINGS: Final = ("auto", "memfd", "cuda_ipc")
_PROBE_TIMEOUT_S: Final = 20.0
# The first one may have to make a context on another GPU.


class Transport(StrEnum):
    MEMFD = "memfd"
    CUDA_IPC = "cuda_ipc"


class TransportChooser:
    """Chooses for the syncs of one pool, and remembers which engines have proved themselves."""

    def __init__(self, pool: str, setting: TransportSetting) -> None:
        self._pool = pool
        self._setting = setting
        self._problems: dict[tuple[str, int], tuple[frozenset[bytes], str]] = {}
        self._said: tuple[Transport, str] | None = None

    async def choose(
        self, offers: Sequence[Offer], engines: Sequence[SyncEngine], timeout_s: float
    ) -> Transport:
        """
        Args:
            offers: of all ranks.
            engines: those that may take part; asked the first time that they may.

        Raises:
            WeightSyncError: nothing but cuda_ipc is allowed, and it cannot be had.
        """
        if self._setting == "memfd":
            return self._say(Transport.MEMFD, "it is set")
        problem = _problem_of(offers)
        is_warning = False
        if not problem:
            exports = [offer for offer in offers if isinstance(offer, RankExports)]
            problem = await self._probe(exports, engines, min(timeout_s, _PROBE_TIMEOUT_S))
            is_warning = bool(problem)
        if not problem:
            return self._say(Transport.CUDA_IPC, "all ranks and engines can")
        if self._setting == "cuda_ipc":
            raise WeightSyncError(
                f"pool {self._pool}: transport 'cuda_ipc' cannot be had: {problem}; "
                "'auto' would send these weights through host memory"
            )
        return self._say(Transport.MEMFD, problem, is_warning=is_warning)

    def can_import(self, engine: SyncEngine) -> bool:
        """Whether this life of an engine has proved it."""
        known = self._problems.get((engine.name, engine.incarnation))
        return known is not None and not known[1]

    async def _probe(
        self, exports: Sequence[RankExports], engines: Sequence[SyncEngine], timeout_s: float
    ) -> str:
        """What is wrong with the first engine that cannot open the ranks' memory, or ""."""
        allocations = probe_allocations(exports)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._probe_engine(engine, allocations, timeout_s))
                for engine in engines
            ]
        found = [(e.name, task.result()) for e, task in zip(engines, asked, strict=True)]
        return next((f"{name}: {problem}" for name, problem in found if problem), "")

    async def _probe_engine(
        self, engine: SyncEngine, allocations: Sequence[Allocation], timeout_s: float
    ) -> str:
        key = (engine.name, engine.incarnation)
        devices = frozenset(allocation.device for allocation in allocations)
        known = self._problems.get(key)
        if known is not None and known[0] == devices:
            return known[1]
        wire = [allocation.to_wire() for allocation in allocations]
        try:
            async with asyncio.timeout(timeout_s):
                problem = await engine.probe_import(wire, timeout_s)
        except TimeoutError:
            return f"no answer within {timeout_s:.3g} s"  # asked anew next time
        except UmbraError as error:
            return str(error)
        except Exception as error:  # an engine must not end the supervisor
            logger.exception("probing %s broke", engine.name)
            return repr(error)
        self._problems = {
            other: found for other, found in self._problems.items() if other[0] != engine.name
        } | {key: (devices, str(problem))}
        return str(problem)

    def _say(self, transport: Transport, reason: str, *, is_warning: bool = False) -> Transport:
        """Logs the choice where it is another one than before."""
        if self._said != (transport, reason):
            self._said = transport, reason
            level = logging.WARNING if is_warning else logging.INFO
            logger.log(
                level, "pool %s: weights travel by %s: %s", self._pool, str(transport), reason
            )
        return transport


def _problem_of(offers: Sequence[Offer]) -> str:
    for rank, offer in enumerate(offers):
        if isinstance(offer, str):
            return f"rank {rank}: {offer}"
    if not any(offer.parts for offer in offers if isinstance(offer, RankExports)):
        return "there is nothing to send"
    return ""
