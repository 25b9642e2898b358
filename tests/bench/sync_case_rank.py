"""A rank of a case of the weights benchmark: `torchrun ... sync_case_rank.py CASE FOLDER`.

Rank 0 starts the pool, and in a standalone case a manager that keeps its engine busy. All ranks
publish their shards. What rank 0 has measured goes to FOLDER/facts.json, and the trace of all
processes to FOLDER/run.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from bench_programs import BenchError
from bench_progress import progress
from gap_manager import gap_manager_spec
from qwen3_shapes import SHAPES, parameter_shapes
from sync_case import ENGINE_DTYPE, POOL, PROMPT_LEN, SyncCase
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.collective import SessionSync
from umbra.runtime.process.nvml import Nvml
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session import Session, SessionConfig
from umbra.runtime.tracing.spans import span
from umbra.runtime.weights.weight_publisher import WeightPublisher
from umbra.trainer.world import World, barrier, from_lead, usable_gpus

_TIMEOUT_S: Final = 400.0
# Longer than the engine's start, for which the other ranks wait.
_BUSY_S: Final = 0.5
# Of generation between two syncs. Shorter: too few steps for the usual distance between tokens.
_SETTLED: Final = 6
# The version whose sync is the fifth after the first one.


@dataclass(slots=True, kw_only=True)
class _Measured:
    """What a rank has measured.

    Attributes:
        syncs: for each version, from 1 on, the report's fields and `publish_s`.
        cast_copy_s: of each copy of the rank's own shards to the engines' dtype.
        used_nbytes: per GPU of the case, before the first sync, and in the steady state; none for
            an engine that generates, whose own memory grows.
        gaps: for each version after the first, see `GapManager.token_gaps`, of the sync and of the
            time before it.
    """

    nbytes: int
    syncs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    cast_copy_s: list[float] = field(default_factory=list[float])
    used_nbytes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    gaps: list[dict[str, dict[str, float]]] = field(
        default_factory=list[dict[str, dict[str, float]]]
    )


def main() -> None:
    case, folder = SyncCase.from_json(sys.argv[1]), Path(sys.argv[2])
    environment = TorchrunEnvironment.read()
    config = SessionConfig(run_dir=folder / "run", trace=True)
    with (
        Session.from_torchrun(config) as session,
        World.join(environment, case.device, _TIMEOUT_S) as world,
    ):
        measured = _Rank(case, folder, session, world).measure()
    if world.is_lead:
        progress("the engine has ended")
        (folder / "facts.json").write_text(json.dumps(asdict(measured)))


class _Rank:
    def __init__(self, case: SyncCase, folder: Path, session: Session, world: World) -> None:
        self._case = case
        self._folder = folder
        self._session = session
        self._world = world
        self._pool = session.pool(POOL)
        self._gpus = usable_gpus()[: case.num_gpus] if case.device == "cuda" else ()

    def measure(self) -> _Measured:
        self._progress("the ranks have met, the engine starts")
        from_lead(self._world, self._start_pool)  # first, as it needs most of a GPU's memory
        self._progress("the engine has started")
        tensors = sharded_tensors(self._case, self._world)
        copies = {
            name: torch.empty_like(tensor.to_local(), dtype=getattr(torch, ENGINE_DTYPE))
            for name, tensor in tensors.items()
        }
        publisher = WeightPublisher(
            SessionSync(self._session),
            self._world.rank,
            self._world.world_size,
            tensors,
            getattr(torch, ENGINE_DTYPE),
        )
        measured = _Measured(nbytes=publisher.manifest.payload_nbytes)
        with closing(publisher):
            self._look_at_memory(measured)
            self._publish(publisher, 1, measured)
            manager = self._start_requests()
            for version in range(2, 2 + self._case.num_syncs):
                if self._case.mode == "hybrid":
                    from_lead(self._world, self._pool.sleep)
                measured.cast_copy_s.append(_timed_copy(copies, tensors, self._world.device))
                if manager is None:
                    self._publish(publisher, version, measured)
                else:
                    self._publish_to_busy(publisher, version, measured, manager)
                if version == min(_SETTLED, 1 + self._case.num_syncs):
                    self._look_at_memory(measured)
        return measured

    def _progress(self, text: str) -> None:
        if self._world.is_lead:
            progress(text)

    def _start_pool(self) -> None:
        model = self._case.write_model(self._folder / "model")
        self._session.create_pool(self._case.pool_spec(model, self._gpus))

    def _start_requests(self) -> SyncHandle | None:
        """Keeps a standalone engine busy; returns the manager that does so, on rank 0."""
        if not self._case.num_requests or not self._world.is_lead:
            return None
        spec = gap_manager_spec(POOL, PROMPT_LEN, self._case.context_len - PROMPT_LEN)
        manager = self._session.spawn(spec)
        manager.call("keep_in_flight", self._case.num_requests)
        manager.call("first_tokens", 1, 1, timeout_s=_TIMEOUT_S)
        return manager

    def _publish(self, publisher: WeightPublisher, version: int, measured: _Measured) -> None:
        barrier()
        with span("sync", version=version) as sync:
            report = publisher.publish(POOL, version, _TIMEOUT_S)
        if report.failed:
            raise BenchError(f"version {version}: {report.failed}")
        self._progress(f"sync {version} of {1 + self._case.num_syncs}: {sync.seconds:.3f} s")
        measured.syncs.append(report.to_wire() | {"publish_s": sync.seconds})

    def _publish_to_busy(
        self, publisher: WeightPublisher, version: int, measured: _Measured, manager: SyncHandle
    ) -> None:
        began = time.monotonic()
        time.sleep(_BUSY_S)
        before = time.monotonic()
        self._publish(publisher, version, measured)
        (came_at,) = manager.call("first_tokens", version, 1, timeout_s=_TIMEOUT_S)
        time.sleep(_BUSY_S)  # until each request has a token of the new version
        measured.gaps.append(
            {
                "usual": manager.call("token_gaps", began, before),
                "sync": manager.call("token_gaps", before, came_at),
            }
        )

    def _look_at_memory(self, measured: _Measured) -> None:
        """What all processes have in use of each GPU; nothing is cached for later in this one."""
        if not self._gpus or self._case.num_requests:
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        barrier()
        nvml = Nvml.open(gpus=self._gpus)
        assert nvml is not None, "NVML knows no GPU, although torch does"
        with closing(nvml):
            measured.used_nbytes.append(nvml.read(()).used_nbytes)
        barrier()  # until all ranks have read


def sharded_tensors(case: SyncCase, world: World) -> dict[str, DTensor]:
    """Parameters that are sharded over the ranks as by FSDP2. Norms are 1, all others random."""
    tensors: dict[str, DTensor] = {}
    for name, (num_rows, *sizes) in parameter_shapes(SHAPES[case.shape]).items():
        local = torch.ones(
            (num_rows // world.world_size, *sizes),
            dtype=getattr(torch, case.dtype),
            device=world.device,
        )
        if sizes:
            local.normal_(std=0.02)
        tensors[name] = DTensor.from_local(local, world.mesh, [Shard(0)], run_check=False)
    return tensors


def _timed_copy(
    copies: Mapping[str, Tensor], tensors: Mapping[str, DTensor], device: torch.device
) -> float:
    began = time.perf_counter()
    for name, tensor in tensors.items():
        copies[name].copy_(tensor.to_local())
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
