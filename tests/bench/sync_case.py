"""A case of the weights benchmark in which a pool with a real engine gets weights from ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from qwen3_shapes import SHAPES, qwen3_config

from umbra.runtime.actor.actor_spec import RestartPolicy
from umbra.runtime.cluster.placement import EngineGpus
from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.pools.pool_spec import PoolSpec

Mode = Literal["hybrid", "standalone"]

POOL: Final = "policy"
ENGINE: Final = f"{POOL}-0"
ENGINE_DTYPE: Final = "bfloat16"
PROMPT_LEN: Final = 32
NEVER: Final = 1 << 30
_CONTEXT_LENS: Final[Mapping[Mode, int]] = {"hybrid": 512, "standalone": 2048}
# A hybrid engine generates nothing here, and an 8B's float32 parameters leave it little memory.
_START_TIMEOUT_S: Final = 300.0
_TICK_MS: Final = 1.0
# With ticks of 50 ms, a gap between tokens would be a multiple of that.
_LIBRARY_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "vllm": {"enforce_eager": True},
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
    },
}
# Both start in half the time without CUDA graphs, which weights do not go through.
_GRAPHS_ALONE: Final[Mapping[str, Any]] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# vLLM's compilation_config of an engine that generates. torch.compile would take a minute.


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCase:
    """The options of weights.py.

    Attributes:
        dtype: of the ranks' tensors. Engines have bfloat16.
        mode: hybrid on the ranks' GPUs, over which a library's engine is tensor-parallel, or
            standalone on the GPU after theirs.
        num_syncs: syncs after the first one.
        has_checksums: every second sync compares checksums.
        is_staged: `pool.staged_updates`.
    """

    shape: str
    dtype: str
    device: Literal["cpu", "cuda"]
    engine: str
    mode: Mode
    transport: Literal["memfd", "cuda_ipc"] | None
    num_ranks: int
    num_requests: int
    num_syncs: int
    has_checksums: bool
    is_staged: bool

    @property
    def title(self) -> str:
        ranks = "" if self.num_ranks == 1 else f" on {self.num_ranks} ranks"
        size = self.tensor_parallel_size
        engine = self.engine if size == 1 else f"{self.engine} of tensor parallel {size}"
        parts = [self.shape, f"{self.dtype}{ranks}", f"to {engine}", self.chosen_transport]
        if self.num_running:
            parts.append(f"standalone with {self.num_running} requests")
        if self.has_checksums:
            parts.append("with and without checksums")
        if self.is_staged:
            parts.append("staged")
        return ", ".join(parts)

    @property
    def tensor_parallel_size(self) -> int:
        can_be_parallel = bool(engine_kind(self.engine).parallel_option)
        return self.num_ranks if self.mode == "hybrid" and can_be_parallel else 1

    @property
    def chosen_transport(self) -> Literal["memfd", "cuda_ipc"]:
        return self.transport or ("cuda_ipc" if self.device == "cuda" else "memfd")

    @property
    def num_running(self) -> int:
        """Requests that the engine always works on."""
        return self.num_requests if self.mode == "standalone" else 0

    @property
    def context_len(self) -> int:
        return _CONTEXT_LENS[self.mode]

    @property
    def num_gpus(self) -> int:
        if self.device == "cpu":
            return 0
        return self.num_ranks if self.mode == "hybrid" else self.num_ranks + 1

    def is_checked(self, version: int) -> bool:
        """Whether the sync of a version, counted from 1, is with checksums."""
        return version == 1 or (self.has_checksums and version % 2 == 1)

    def pool_spec(self, model_path: Path, gpus: Sequence[str]) -> PoolSpec:
        """
        Args:
            gpus: of the case, as CUDA_VISIBLE_DEVICES names them; those of the ranks first.
        """
        size = self.tensor_parallel_size
        kind = engine_kind(self.engine)
        options = dict(_LIBRARY_OPTIONS.get(self.engine, {}))
        if size > 1:
            options[kind.parallel_option] = size
        num_seqs = max(16, self.num_running)
        if self.engine == "vllm" and self.mode == "standalone" and self.device == "cuda":
            sizes = {"cudagraph_capture_sizes": [num_seqs]}
            options = {"compilation_config": {**_GRAPHS_ALONE, **sizes}}
        first = 0 if self.mode == "hybrid" else self.num_ranks
        own = tuple(gpus[first : first + size])
        others = tuple(gpu for gpu in gpus if gpu not in own)
        return PoolSpec(
            name=POOL,
            engine=self.engine,
            count=1,
            num_gpus=len(own),
            mode=self.mode,
            transport=self.chosen_transport,
            on_update="keep" if self.mode == "standalone" else "abort",
            verify_every=2 if self.has_checksums else NEVER,
            staged_updates=self.is_staged,
            restart=RestartPolicy(mode="never"),
            start_timeout_s=_START_TIMEOUT_S,
            engine_gpus=(EngineGpus(own=own, others=others),) if gpus else None,
            kwargs={
                "model_path": str(model_path),
                "dtype": ENGINE_DTYPE,
                "device": self.device,
                "max_num_seqs": num_seqs,
                "max_context_len": self.context_len,
                "kv_cache_num_tokens": num_seqs * self.context_len,
                "tick_ms": _TICK_MS,
                **kind.arguments(options),
            },
        )

    def write_model(self, folder: Path) -> Path:
        """A model directory with a configuration alone, which is all that engines read."""
        qwen3_config(SHAPES[self.shape]).save_pretrained(folder)
        return folder

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))
