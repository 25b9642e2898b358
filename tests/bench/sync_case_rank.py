"""A rank of a case of the weights benchmark: `torchrun ... sync_case_rank.py CASE FOLDER`.

Rank 0 starts the pool, and in a standalone case a manager that keeps its engine busy. All ranks
publish their shards. Rank 0's measurements go to FOLDER/facts.json, and the trace of all processes
to FOLDER/run.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from bench_report import BenchError, progress
from gap_manager import gap_manager_spec
from qwen3_shapes import SHAPES, parameter_shapes
from sync_case import ENGINE_DTYPE, POOL, PROMPT_LEN, SyncCase
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from verl_protocol import timed_copy

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.rpc.sync_handle import SyncHandle
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.tracing.spans import span
from umbra.runtime.weights.shards import wire_manifest
from umbra.trainer.world.mesh import Mesh, barrier, from_lead, usable_gpus

_TIMEOUT_S: Final = 400.0
# The other ranks wait for the engine's start, which takes up to 300 s.
_BUSY_S: Final = 0.5
# Generation between two syncs. Less has too few steps for the usual time between tokens.
_NUM_COPIES: Final = 4


def main() -> None:
    case, folder = SyncCase.from_json(sys.argv[1]), Path(sys.argv[2])
    environment = TorchrunEnvironment.read()
    config = SessionConfig(run_dir=folder / "run", trace=True)
    with (
        Session.from_torchrun(config) as session,
        Mesh.join(environment, case.device, _TIMEOUT_S) as world,
    ):
        rank = _Rank(case, folder, session, world)
        nbytes = rank.measure()
    if environment.rank == 0:
        progress("the engine has ended")
        copy_s = _copy_to_engine(case, nbytes // case.num_ranks)
        facts = {"nbytes": nbytes, "copy_s": copy_s, **rank.facts}
        (folder / "facts.json").write_text(json.dumps(facts))


class _Rank:
    """
    Attributes:
        facts: `syncs` has the report of each version, from 1 on, and its `publish_s`. `cast_copy_s`
            and `gaps` begin with version 2. A gap is `GapManager.token_gaps` of the sync and of the
            time before it.
    """

    def __init__(self, case: SyncCase, folder: Path, session: Session, world: Mesh) -> None:
        self._case = case
        self._folder = folder
        self._session = session
        self._world = world
        self._gpus = usable_gpus()[: case.num_gpus] if case.device == "cuda" else ()
        self.facts: dict[str, list[Any]] = {"syncs": [], "cast_copy_s": [], "gaps": []}

    def measure(self) -> int:
        """The bytes of the weights."""
        from_lead(self._world, self._start_pool)  # first, as it needs most of a GPU's memory
        tensors, dtype = sharded_tensors(self._case, self._world), getattr(torch, ENGINE_DTYPE)
        copies = {name: torch.empty_like(t.to_local(), dtype=dtype) for name, t in tensors.items()}
        manifest = wire_manifest(tensors, dtype)
        with closing(WeightPublisher(self._session, tensors, manifest)) as publisher:
            self._publish(publisher, 1)
            manager = self._start_requests()
            for version in range(2, 2 + self._case.num_syncs):
                if self._case.mode == "hybrid":
                    from_lead(self._world, self._session.pool(POOL).sleep)
                copy_s = _cast_shards(copies, tensors, self._world.device)
                self.facts["cast_copy_s"].append(copy_s)
                if manager is None:
                    self._publish(publisher, version)
                else:
                    self._publish_to_busy(publisher, version, manager)
        return publisher.manifest.payload_nbytes

    def _start_pool(self) -> None:
        model = self._case.write_model(self._folder / "model")
        progress("the ranks have met, the engine starts")
        self._session.create_pool(self._case.pool_spec(model, self._gpus))
        progress("the engine has started")

    def _start_requests(self) -> SyncHandle | None:
        """Keeps a standalone engine busy; returns the manager that does so, on rank 0."""
        if not self._case.num_running or not self._world.is_lead:
            return None
        spec = gap_manager_spec(POOL, PROMPT_LEN, self._case.context_len - PROMPT_LEN)
        manager = self._session.spawn(spec)
        manager.call("keep_in_flight", self._case.num_running)
        manager.call("first_tokens", 1, 1, timeout_s=_TIMEOUT_S)
        return manager

    def _publish(self, publisher: WeightPublisher, version: int) -> None:
        barrier()
        with span("sync", version=version) as sync:
            report = publisher.publish(POOL, version, _TIMEOUT_S)
        if report.failed:
            raise BenchError(f"version {version}: {report.failed}")
        if self._world.is_lead:
            progress(f"sync {version} of {1 + self._case.num_syncs}: {sync.seconds:.3f} s")
        self.facts["syncs"].append(asdict(report) | {"publish_s": sync.seconds})

    def _publish_to_busy(
        self, publisher: WeightPublisher, version: int, manager: SyncHandle
    ) -> None:
        began = time.monotonic()
        time.sleep(_BUSY_S)
        before = time.monotonic()
        self._publish(publisher, version)
        (came_at,) = manager.call("first_tokens", version, 1, timeout_s=_TIMEOUT_S)
        time.sleep(_BUSY_S)  # until each request has a token of the new version
        self.facts["gaps"].append(
            {
                "usual": manager.call("token_gaps", began, before),
                "sync": manager.call("token_gaps", before, came_at),
            }
        )


def sharded_tensors(case: SyncCase, world: Mesh) -> dict[str, DTensor]:
    """Parameters, sharded over the ranks as by FSDP2. Norms are 1, all others random."""
    tensors: dict[str, DTensor] = {}
    for name, (num_rows, *sizes) in parameter_shapes(SHAPES[case.shape]).items():
        local = torch.ones(
            (num_rows // world.world_size, *sizes),
            dtype=getattr(torch, case.dtype),
            device=world.device,
        )
        if sizes:
            local.normal_(std=0.02)
        tensors[name] = DTensor.from_local(local, world.fsdp, [Shard(0)], run_check=False)
    return tensors


def _copy_to_engine(case: SyncCase, nbytes: int) -> float:
    """The fastest of some copies. Nothing else uses the GPUs any more."""
    source = case.device
    target = f"cuda:{case.num_ranks}" if case.mode == "standalone" and source == "cuda" else source
    return min(timed_copy(nbytes, source, target) for _ in range(_NUM_COPIES))


def _cast_shards(
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
