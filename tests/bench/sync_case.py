"""A case of the weights benchmark: `torchrun ... sync_case.py CASE FOLDER` is one of its ranks.

Rank 0 starts the pool, and all ranks publish their shards. Rank 0's measurements go to
FOLDER/facts.json, and the trace of all processes to FOLDER/run.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from bench_report import BenchError, progress
from qwen3_shapes import SHAPES, parameter_shapes, qwen3_config
from torch.distributed.tensor import DTensor, Shard

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.cluster.placement import EngineGpus
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.session.weight_publisher import WeightPublisher
from umbra.runtime.tracing.spans import span
from umbra.runtime.weights.shards import wire_manifest
from umbra.trainer.world.mesh import Mesh, barrier, from_lead, usable_gpus

POOL: Final = "policy"
ENGINE: Final = f"{POOL}-0"
_ENGINE_DTYPE: Final = "bfloat16"
_NEVER: Final = 1 << 30
_NUM_SEQS, _CONTEXT_LEN = 16, 512  # of an engine that generates nothing
_START_TIMEOUT_S: Final = 300.0
_TIMEOUT_S: Final = 400.0
# The other ranks wait for the engine's start.
_LIBRARY_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm": {"enforce_eager": True},
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
    },
}
# Both start in half the time without CUDA graphs, which weights do not go through.


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCase:
    """The options of weights.py.

    Attributes:
        dtype: of the ranks' tensors. Engines have bfloat16.
        num_syncs: syncs after the first one.
        has_checksums: syncs of odd versions compare checksums.
    """

    shape: str
    dtype: str
    device: Literal["cpu", "cuda"]
    engine: str
    transport: Literal["memfd", "cuda_ipc"] | None
    num_ranks: int
    num_syncs: int
    has_checksums: bool

    def pool_spec(self, model_path: Path, gpus: Sequence[str]) -> PoolSpec:
        """
        Args:
            gpus: of the ranks, as CUDA_VISIBLE_DEVICES names them. A library's engine is
                tensor-parallel over them.
        """
        kind = engine_kind(self.engine)
        options = dict(_LIBRARY_OPTIONS.get(self.engine, {}))
        size = self.num_ranks if kind.parallel_option else 1
        if size > 1:
            options[kind.parallel_option] = size
        own, others = tuple(gpus[:size]), tuple(gpus[size:])
        return PoolSpec(
            name=POOL,
            engine=self.engine,
            count=1,
            num_gpus=len(own),
            transport=self.transport or ("cuda_ipc" if self.device == "cuda" else "memfd"),
            on_update="abort",
            verify_every=2 if self.has_checksums else _NEVER,
            restart=RestartPolicy(mode="never"),
            start_timeout_s=_START_TIMEOUT_S,
            engine_gpus=(EngineGpus(own=own, others=others),) if gpus else None,
            kwargs={
                "model_path": str(model_path),
                "dtype": _ENGINE_DTYPE,
                "device": self.device,
                "max_num_seqs": _NUM_SEQS,
                "max_context_len": _CONTEXT_LEN,
                "kv_cache_num_tokens": _NUM_SEQS * _CONTEXT_LEN,
                **kind.arguments(options),
            },
        )


def main() -> None:
    case, folder = SyncCase(**json.loads(sys.argv[1])), Path(sys.argv[2])
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
        (folder / "facts.json").write_text(json.dumps({"nbytes": nbytes, "syncs": rank.syncs}))


class _Rank:
    """
    Attributes:
        syncs: the report of each version, from 1 on, and its `publish_s`.
    """

    def __init__(self, case: SyncCase, folder: Path, session: Session, world: Mesh) -> None:
        self._case = case
        self._folder = folder
        self._session = session
        self._world = world
        self._gpus = usable_gpus()[: case.num_ranks] if case.device == "cuda" else ()
        self.syncs: list[dict[str, Any]] = []

    def measure(self) -> int:
        """The bytes of the weights."""
        from_lead(self._world, self._start_pool)  # first, as it needs most of a GPU's memory
        tensors = sharded_tensors(self._case, self._world)
        manifest = wire_manifest(tensors, getattr(torch, _ENGINE_DTYPE))
        with closing(WeightPublisher(self._session, tensors, manifest)) as publisher:
            self._publish(publisher, 1)
            for version in range(2, 2 + self._case.num_syncs):
                from_lead(self._world, self._session.pool(POOL).sleep)
                self._publish(publisher, version)
        return publisher.manifest.payload_nbytes

    def _start_pool(self) -> None:
        model = self._folder / "model"
        qwen3_config(SHAPES[self._case.shape]).save_pretrained(model)  # all that engines read
        progress("the ranks have met, the engine starts")
        self._session.create_pool(self._case.pool_spec(model, self._gpus))
        progress("the engine has started")

    def _publish(self, publisher: WeightPublisher, version: int) -> None:
        barrier()
        with span("sync", version=version) as sync:
            report = publisher.publish(POOL, version, _TIMEOUT_S)
        if report.failed:
            raise BenchError(f"version {version}: {report.failed}")
        if self._world.is_lead:
            progress(f"sync {version} of {1 + self._case.num_syncs}: {sync.seconds:.3f} s")
        self.syncs.append(asdict(report) | {"publish_s": sync.seconds})


def sharded_tensors(case: SyncCase, world: Mesh) -> dict[str, DTensor]:
    """Parameters, sharded over the ranks as by FSDP2. Norms are 1, all others random."""
    tensors: dict[str, DTensor] = {}
    dtype = getattr(torch, case.dtype)
    for name, (num_rows, *sizes) in parameter_shapes(SHAPES[case.shape]).items():
        shape = (num_rows // world.world_size, *sizes)
        local = torch.ones(shape, dtype=dtype, device=world.device)
        if sizes:
            local.normal_(std=0.02)
        tensors[name] = DTensor.from_local(local, world.fsdp, [Shard(0)], run_check=False)
    return tensors


if __name__ == "__main__":
    main()
