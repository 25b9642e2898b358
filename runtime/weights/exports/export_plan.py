from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from umbra.runtime.errors import UmbraError
from umbra.runtime.weights.image.image_memory import PlanParts, numbered
from umbra.runtime.weights.rank_exports import Allocation, RankExports, probe_allocations
from umbra.runtime.weights.transport import (
    Layout,
    LayoutOrder,
    ProbedEngine,
    Problem,
    RankOffer,
    find_distance,
)

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S: Final = 20.0
# The first probe may have to create a context on another GPU.


class ExportPlan:
    """CUDA IPC, the supervisor's part: whether engines can read the ranks' GPUs. Torch-free.

    They can if every rank exports its memory and every engine has opened some of it, which each
    incarnation proves once. The control block is in the pool's memory.
    """

    def __init__(self, parts: PlanParts) -> None:
        self._memory = parts.memory
        self._is_staged = parts.is_staged
        self._problems: dict[tuple[str, int], tuple[frozenset[bytes], str]] = {}

    async def find_problem(
        self, ranks: Sequence[RankOffer], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> Problem | None:
        """Probes each engine once, before it may take part."""
        exports: list[RankExports] = []
        for rank in ranks:
            if isinstance(rank.offer, str):
                return Problem(f"rank {rank.rank}: {rank.offer}")
            exports.append(RankExports.from_wire(rank.offer))
        distance = find_distance(ranks, engines)
        if distance is not None:
            return distance
        if not any(exported.parts for exported in exports):
            return Problem("there is nothing to send")
        found = await self._probe(exports, engines, min(timeout_s, _PROBE_TIMEOUT_S))
        return Problem(found, is_warning=True) if found else None

    def can_reach(self, engine: ProbedEngine) -> bool:
        known = self._problems.get((engine.name, engine.incarnation))
        return known is not None and not known[1]

    @asynccontextmanager
    async def lay_out(self, order: LayoutOrder) -> AsyncGenerator[Layout]:
        """Tensors are loaded one by one, so the control block counts tensors."""
        with self._memory.progress(len(order.ranks), len(order.engines)) as (wire, progress):
            details = {
                **wire,
                "exports": [rank.offer for rank in order.ranks],
                "has_checksums": order.has_checksums,
                "is_staged": self._is_staged,
            }
            yield Layout(
                rank_details=lambda rank: wire,
                engine_details=numbered(details, len(order.engines)),
                progress=progress,
                num_buckets=len(order.manifest.entries),
            )

    async def _probe(
        self, exports: Sequence[RankExports], engines: Sequence[ProbedEngine], timeout_s: float
    ) -> str:
        allocations = probe_allocations(exports)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._probe_engine(engine, allocations, timeout_s))
                for engine in engines
            ]
        found = [(e.name, task.result()) for e, task in zip(engines, asked, strict=True)]
        return next((f"{name}: {problem}" for name, problem in found if problem), "")

    async def _probe_engine(
        self, engine: ProbedEngine, allocations: Sequence[Allocation], timeout_s: float
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
            return f"no answer within {timeout_s:.3g} s"  # probed again next time
        except UmbraError as error:
            return str(error)
        except Exception as error:  # an engine must not end the supervisor
            logger.exception("probing %s failed unexpectedly", engine.name)
            return repr(error)
        self._problems = {
            other: found for other, found in self._problems.items() if other[0] != engine.name
        } | {key: (devices, str(problem))}
        return str(problem)
