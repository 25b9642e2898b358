"""A case of the weights benchmark in which a pool with a real engine gets weights from ranks."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from qwen3_shapes import SHAPES, parameter_shapes

from umbra.runtime.actor.restart_policy import RestartPolicy
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
# A hybrid engine generates nothing here, and has little memory beside an 8B's float32 parameters.
_START_TIMEOUT_S: Final = 300.0
# A tensor-parallel engine of an 8B starts in a minute, on a host whose disk is cold in two.
_TICK_MS: Final = 1.0
# Tokens are sent as they come: with ticks of 50 ms, a gap would be a multiple of that.
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
# vLLM's compilation_config of an engine that generates. Without graphs, a step of an 8B took 21 to
# 33 ms, which is a guess at how long Python needs to launch it. torch.compile would take a minute.


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCase:
    """What is measured.

    Attributes:
        shape: of a Qwen3, see `qwen3_shapes`.
        dtype: of the ranks' tensors. Engines have bfloat16.
        engine: short name of one of umbra's engines.
        mode: where the engine is: hybrid on the ranks' GPUs, over which a library's engine is
            tensor-parallel, standalone on the GPU after theirs.
        num_requests: requests that a standalone engine works on all the time.
        num_syncs: syncs after the first one.
        has_checksums: every second one of them is with checksums.
        is_staged: the engine reads an update into spare memory while it generates.
    """

    shape: str
    dtype: str
    device: Literal["cpu", "cuda"]
    engine: str
    mode: Mode
    transport: Literal["memfd", "cuda_ipc"]
    num_ranks: int
    num_requests: int
    num_syncs: int
    has_checksums: bool
    is_staged: bool

    @property
    def title(self) -> str:
        """As a result names it, such as "8B, bfloat16 on 2 ranks, to vllm of tensor parallel 2"."""
        ranks = "" if self.num_ranks == 1 else f" on {self.num_ranks} ranks"
        size = self.tensor_parallel_size
        engine = self.engine if size == 1 else f"{self.engine} of tensor parallel {size}"
        parts = [self.shape, f"{self.dtype}{ranks}", f"to {engine}", self.transport]
        if self.mode == "standalone":
            parts.append(f"standalone with {self.num_requests} requests")
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
    def context_len(self) -> int:
        return _CONTEXT_LENS[self.mode]

    @property
    def num_gpus(self) -> int:
        """GPUs that it needs, those of the ranks first."""
        if self.device == "cpu":
            return 0
        return self.num_ranks if self.mode == "hybrid" else self.num_ranks + 1

    def is_checked(self, version: int) -> bool:
        """Whether the sync of a version, counted from 1, is with checksums."""
        return version == 1 or (self.has_checksums and version % 2 == 1)

    def pool_spec(self, model_path: Path, gpus: Sequence[str]) -> PoolSpec:
        """
        Args:
            gpus: the GPUs of the case, as CUDA_VISIBLE_DEVICES names them.
        """
        size = self.tensor_parallel_size
        kind = engine_kind(self.engine)
        options = dict(_LIBRARY_OPTIONS.get(self.engine, {}))
        if size > 1:
            options[kind.parallel_option] = size
        num_seqs = max(16, self.num_requests)
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
            transport=self.transport,
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
        from transformers import Qwen3Config

        sizes = SHAPES[self.shape]
        Qwen3Config(
            **sizes,
            tie_word_embeddings="lm_head.weight" not in parameter_shapes(sizes),
            max_position_embeddings=4096,
            architectures=["Qwen3ForCausalLM"],
            dtype=ENGINE_DTYPE,
        ).save_pretrained(folder)
        return folder

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))
