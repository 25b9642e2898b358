from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from umbra.engines.shell.adapter_settings import EngineOptions, SpanningSettings, read_config
from umbra.engines.vllm.vllm_scheduler import SCHEDULER
from umbra.runtime.engine_api.engine_names import kv_token_nbytes
from umbra.runtime.engine_api.lora import read_adapter_rank
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.host_memory import physical_nbytes

WORKER_EXTENSION: Final = "umbra.engines.vllm.vllm_worker.UmbraWorkerExtension"
SYNCED_ADAPTER: Final = ("of the last sync", 1)
"""vLLM's name and number of the LoRA adapter that a sync brings."""

_OTHER_STORE: Final = "keys and values kept elsewhere may be those of another engine's weights"
_ONE_MODEL: Final = "an engine is one model, and pool.count gives more engines"
_NODES: Final = "an engine is on several nodes if it needs more GPUs than a node has"
_SAMPLING: Final = "each request sets how to sample, and nothing else may change the distribution"
_DRAFTS: Final = "a draft model would keep its older weights"
_QUEUE: Final = "umbra bounds what an engine holds, and would be refused requests"
_STATISTICS: Final = "vLLM would see the last tokens of each request alone"
_OVERLAP: Final = "it needs several data-parallel ranks, and pool.count gives more engines"
_ON_THE_HOST: Final = "an update does not reach weights that vLLM keeps in host memory"

OPTIONS: Final = EngineOptions(
    library="vLLM",
    owner="AsyncEngineArgs",
    own_settings={
        "model": "model.path",
        "dtype": "model.dtype",
        "max_model_len": "pool.max_context_len",
        "max_num_seqs": "pool.max_num_seqs",
        "kv_cache_memory_bytes": "pool.kv_cache_num_tokens",
        "device_ids": "pool.gpus",
        "enable_lora": "pool.lora_adapters",
    },
    fixed={
        "tokenizer": "engines take and give tokens",
        "skip_tokenizer_init": "engines take and give tokens",
        "logprobs_mode": "logprobs must be those of the distribution that is sampled from",
        "generation_config": "each request sets how to sample, not the model directory",
        "override_generation_config": "each request sets how to sample",
        "logits_processors": _SAMPLING,
        "watermark_config": _SAMPLING,
        "speculative_config": _DRAFTS,
        "spec_method": _DRAFTS,
        "spec_model": _DRAFTS,
        "spec_tokens": _DRAFTS,
        "load_format": "the weights come from the trainer",
        "weight_transfer_config": "umbra transfers the weights",
        "worker_cls": "umbra transfers the weights to vLLM's own worker",
        "worker_extension_cls": "umbra transfers the weights",
        "diffusion_config": "each token needs a logprob given those before it",
        "enable_dbo": _OVERLAP,
        "ubatch_size": _OVERLAP,
        "max_num_queued_reqs": _QUEUE,
        "max_num_queued_tokens": _QUEUE,
        "disable_log_stats": _STATISTICS,
        "otlp_traces_endpoint": _STATISTICS,
        "cpu_offload_gb": _ON_THE_HOST,
        "offload_backend": _ON_THE_HOST,
        "offload_group_size": _ON_THE_HOST,
        "enable_eplb": "an update would write experts to where they were before vLLM moved them",
        "enable_sleep_mode": "engines free their memory when they sleep",
        "stream_interval": "tokens that wait would count as made by the weights that come next",
        "kv_transfer_config": _OTHER_STORE,
        "kv_offloading_backend": _OTHER_STORE,
        "kv_offloading_size": _OTHER_STORE,
        "pipeline_parallel_size": "loading weights is tested with tensor parallelism "
        "(tensor_parallel_size) only",
        "data_parallel_size": _ONE_MODEL,
        "nnodes": _NODES,
        "node_rank": _NODES,
        "master_addr": _NODES,
        "master_port": _NODES,
        "distributed_executor_backend": "umbra supervises the processes",
        "scheduler_cls": "vLLM's own scheduler brings the logprobs",
    },
)

_CPU_OPTIONS: Final = {"enforce_eager": True, "enable_chunked_prefill": False}
# If a step takes only part of a prompt, vLLM (0.32.0) rewinds the request's generator. CPU
# generators cannot rewind: the engine would die as soon as the trajectories to resume
# exceed a step.
_CPU_BLOCK_NUM_TOKENS: Final = 128
_CPU_KV_SHARE_OF_MEMORY: Final = 1 / 8
# Share of the host's memory if no size is set. vLLM takes it at once, used or not.
_LEAST_MEMORY_SHARE: Final = 0.01
# Without effect if a size is set, but vLLM refuses to start if less of the GPU is free: a larger
# share fails when a trainer already holds its model there.
_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# The ranks of vLLM's kernels; adapters of lower rank are padded.
_ITEMSIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(SpanningSettings):
    """Settings of a vLLM engine; `engine_args` are options of its AsyncEngineArgs.

    If `kv_cache_num_tokens` is None, vLLM chooses on a GPU (`gpu_memory_utilization`). On the CPU
    it is enough for max_num_seqs sequences of max_context_len, but at most an eighth of the memory.

    Attributes:
        lora_adapters: folders of adapters by name.
    """

    kind: ClassVar[str] = "vllm"

    lora_adapters: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        SpanningSettings.__post_init__(self)
        if self.lora_rank and self.lora_adapters:
            raise ConfigError(
                f"lora_rank = {self.lora_rank} and lora_adapters exclude each other: a request has "
                "one adapter, that of the last sync or one that it names"
            )

    def part_options(self, part: int, address: str, port: int) -> dict[str, Any]:
        return {
            "nnodes": self.num_parts,
            "node_rank": part,
            "master_addr": address,
            "master_port": port,
        }

    def options(self, known: Collection[str], *, is_cpu: bool) -> dict[str, Any]:
        OPTIONS.check(self.engine_args, known)
        if (self.device == "cpu") != is_cpu:
            built_for = "the CPU" if is_cpu else "GPUs"
            raise ConfigError(
                f"device {self.device!r}: the installed vLLM is built for {built_for}"
            )
        if is_cpu and self.engine_args.get("enable_chunked_prefill"):
            raise ConfigError(
                "pool.engine_args.enable_chunked_prefill: on the CPU vLLM's engine dies if it "
                "takes a prompt in parts; leave it out"
            )
        backend = str(self.engine_args.get("moe_backend"))
        if backend.startswith("flashinfer_moe_ep"):
            raise ConfigError(
                f"pool.engine_args.moe_backend = {backend!r} keeps copies of the experts' weights "
                "that no update reaches: choose another backend"
            )
        options: dict[str, Any] = {
            "model": self.model_path,
            "dtype": self.dtype,
            "max_model_len": self.max_context_len,
            "max_num_seqs": self.max_num_seqs,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            # "auto" would prefer Mistral's own files to those that the trainer reads.
            "load_format": "safetensors" if self.reads_weights else "dummy",
            "worker_extension_cls": WORKER_EXTENSION,
            "scheduler_cls": SCHEDULER,
            "disable_log_stats": True,
            **(_CPU_OPTIONS if is_cpu else {"enable_sleep_mode": True}),
            **self._lora_options(is_cpu=is_cpu),
        }
        nbytes = self._kv_cache_nbytes(is_cpu=is_cpu)
        if nbytes is not None:
            options["kv_cache_memory_bytes"] = nbytes
            if not is_cpu:
                options["gpu_memory_utilization"] = _LEAST_MEMORY_SHARE
        args = dict(self.engine_args)
        if changes := self.config_changes():
            options["hf_overrides"] = changes | args.pop("hf_overrides", {})
        return options | args

    def environment(self, *, is_cpu: bool) -> dict[str, str]:
        """Variables for vLLM's processes, unless the user has set them."""
        variables = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}
        # Else it uses all cores, which trainer and other engines share.
        if is_cpu:
            bind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            return variables | bind | {"OMP_NUM_THREADS": str(self.num_threads)}
        # vLLM's older model runner, which it may take silently, starts kernels for each seed.
        return variables | {"VLLM_USE_V2_MODEL_RUNNER": "1", "OMP_NUM_THREADS": "1"}

    def _lora_options(self, *, is_cpu: bool) -> dict[str, Any]:
        """One slot for each adapter, unless `engine_args` set their number."""
        if not (self.lora_adapters or self.lora_rank):
            return {}
        if not is_cpu and self.dtype == "float32":
            raise ConfigError(
                "vLLM's LoRA kernels for GPUs do not support float32: use dtype bfloat16"
            )
        model_path = Path(self.model_path)
        ranks = {
            f"LoRA adapter {name!r}": read_adapter_rank(name, Path(path), model_path)
            for name, path in self.lora_adapters.items()
        } or {"a LoRA adapter of a sync": self.lora_rank}
        largest = max(ranks, key=lambda name: ranks[name])
        if ranks[largest] > _LORA_RANKS[-1]:
            raise ConfigError(
                f"{largest} has rank {ranks[largest]}; vLLM's limit is {_LORA_RANKS[-1]}"
            )
        num_slots = len(ranks)
        if is_cpu and self.lora_adapters:
            # One slot stays empty: for requests without an adapter, vLLM (0.32.0) uses the last
            # slot if others in the batch have one, until its CPU operations skip index -1.
            num_slots += 1
            if "max_loras" in self.engine_args:
                raise ConfigError("pool.engine_args.max_loras is set by umbra on the CPU")
        return {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in _LORA_RANKS if rank >= ranks[largest]),
            "max_loras": num_slots,
            "max_cpu_loras": num_slots,  # with fewer, folders would be read again and again
        }

    def _kv_cache_nbytes(self, *, is_cpu: bool) -> int | None:
        num_tokens = self.kv_cache_num_tokens
        if num_tokens is None and not is_cpu:
            return None
        if self.dtype not in _ITEMSIZES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not vLLM's; allowed: {', '.join(_ITEMSIZES)}"
            )
        token_nbytes = kv_token_nbytes(
            read_config(self.model_path),
            _ITEMSIZES[self.dtype],
            tensor_parallel_size=self.num_workers,
        )
        if num_tokens is None:
            most = int(physical_nbytes() * _CPU_KV_SHARE_OF_MEMORY) // token_nbytes
            full_size = self.max_num_seqs * _whole_blocks(self.max_context_len)
            num_tokens = max(min(full_size, most), self.max_context_len)
        # vLLM keeps one more block for padding.
        nbytes = (_whole_blocks(num_tokens) + _CPU_BLOCK_NUM_TOKENS) * token_nbytes
        if is_cpu and nbytes > physical_nbytes():
            raise ConfigError(
                f"a KV cache of {num_tokens} tokens takes {nbytes / 1e9:.3g} GB, but this machine "
                f"has {physical_nbytes() / 1e9:.3g} GB of memory: lower max_context_len or "
                "kv_cache_num_tokens"
            )
        return nbytes


def _whole_blocks(num_tokens: int) -> int:
    return -(-num_tokens // _CPU_BLOCK_NUM_TOKENS) * _CPU_BLOCK_NUM_TOKENS
