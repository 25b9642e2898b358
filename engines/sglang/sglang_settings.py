from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from umbra.engines.shell.adapter_settings import EngineOptions, SpanningSettings, read_config
from umbra.runtime.errors import ConfigError

WEIGHT_LOADER: Final = "umbra.engines.sglang.sglang_worker.obey"
SYNCED_ADAPTER: Final = "of-the-last-sync"
"""SGLang's id of the LoRA adapter that a sync brings."""

_TOKENS: Final = "engines take and give tokens"
_WEIGHTS: Final = "umbra transfers the weights"
_ONE_MODEL: Final = "an engine is one model, and pool.count gives more engines"
_NODES: Final = "an engine is on several nodes if it needs more GPUs than a node has"
_TCP: Final = "with data parallelism inside an engine, schedulers take messages by tcp"
_OTHER_STORE: Final = "keys and values are found there by the tokens alone, whatever the weights"

OPTIONS: Final = EngineOptions(
    library="SGLang",
    owner="ServerArgs",
    own_settings={
        "model_path": "model.path",
        "dtype": "model.dtype",
        "device": "pool.device",
        "context_length": "pool.max_context_len",
        "max_running_requests": "pool.max_num_seqs",
        "max_total_tokens": "pool.kv_cache_num_tokens",
        "base_gpu_id": "pool.gpus",
        "gpu_id_step": "pool.gpus",
    },
    fixed={
        "tokenizer_path": _TOKENS,
        "skip_tokenizer_init": _TOKENS,
        "tokenizer_worker_num": _TOKENS,
        "detokenizer_worker_num": _TOKENS,
        "load_format": "the weights come from the trainer",
        "custom_weight_loader": _WEIGHTS,
        "weight_version": _WEIGHTS,
        "enable_memory_saver": "engines free their memory when they sleep",
        "preferred_sampling_params": "each request sets how to sample",
        "allow_auto_truncate": "a request is served whole or not at all",
        "stream_interval": "umbra sets one for each request, by the number of requests",
        "incremental_streaming_output": "the adapter reads the list that SGLang adds to",
        "custom_sigquit_handler": "umbra supervises the processes",
        "watchdog_timeout": "pool.stall_limit_s limits the time without a token",
        "dp_size": _ONE_MODEL,
        "dwdp_size": _ONE_MODEL,
        "enable_dp_attention": _TCP,
        "attn_dp_size": _TCP,
        "pp_size": "loading weights is tested with tensor parallelism (tp_size) only",
        "nnodes": _NODES,
        "node_rank": _NODES,
        "dist_init_addr": _NODES,
        "use_ray": "umbra supervises the processes",
        "speculative_algorithm": "a draft model would keep its older weights",
        "disaggregation_mode": "an engine both reads prompts and generates",
        "enable_lmcache": _OTHER_STORE,
        "enable_flexkv": _OTHER_STORE,
        "hicache_storage_backend": _OTHER_STORE,
        "radix_cache_backend": _OTHER_STORE,
        "enable_unified_cache_external_linker": _OTHER_STORE,
        "enable_watermark": "logprobs would not be those of the distribution sampled from",
        "weight_cache_mode": "an update would write to the weights that other engines share",
    },
)

_NEVER_S: Final = 1e8
_SPARE_CONTEXT_LEN: Final = 8
# SGLang (0.5.17) ends a request two tokens before its context is full,
_SPARE_KV_NUM_TOKENS: Final = 256
# and a page and one token before its KV cache is full.
_LORA_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NUM_LORA_SLOTS: Final = 2
# One for the adapter of the last sync, one for the first requests, which have none.
_DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(SpanningSettings):
    """Settings of an SGLang engine; `engine_args` are options of its ServerArgs.

    If `kv_cache_num_tokens` is None, SGLang chooses (`mem_fraction_static`). With `lora_rank`, the
    option `lora_target_modules` names the ends of the modules' names that adapters may have; the
    default is the linear layers of a dense decoder.
    """

    kind: ClassVar[str] = "sglang"

    def part_options(self, part: int, address: str, port: int) -> dict[str, Any]:
        host = f"[{address}]" if ":" in address else address
        return {
            "nnodes": self.num_parts,
            "node_rank": part,
            "dist_init_addr": f"{host}:{port}",
        }

    def options(self, known: Collection[str]) -> dict[str, Any]:
        OPTIONS.check(self.engine_args, known)
        self._check_context_len()
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not SGLang's; allowed: {', '.join(_DTYPES)}"
            )
        if self.device != "cuda":
            raise ConfigError(
                f"device {self.device!r}: SGLang's published builds need a GPU; use cuda"
            )
        args = dict(self.engine_args)
        options: dict[str, Any] = {
            "model_path": self.model_path,
            "dtype": self.dtype,
            "device": "cuda",
            "context_length": self.max_context_len + _SPARE_CONTEXT_LEN,
            "max_running_requests": self.max_num_seqs,
            "skip_tokenizer_init": True,
            # "auto" would prefer Mistral's own files to those that the trainer reads.
            "load_format": "safetensors" if self.reads_weights else "dummy",
            "custom_weight_loader": [WEIGHT_LOADER],
            "watchdog_timeout": _NEVER_S,  # it would take frozen requests for a stall
            "enable_memory_saver": True,
            "sleep_on_idle": True,  # else each process keeps a core busy while the trainer works
            "log_level": "warning",
            # Requests carry their stop tokens; the model's own would end them, too.
            "json_model_override_args": _model_overrides(
                args.pop("json_model_override_args", "{}"), self._config_changes()
            ),
        }
        if self.lora_rank:
            options |= {
                "enable_lora": True,
                "max_lora_rank": self.lora_rank,
                "lora_target_modules": list(_LORA_MODULES),
                "max_loras_per_batch": _NUM_LORA_SLOTS,
            }
        if self.kv_cache_num_tokens is not None:
            options["max_total_tokens"] = self.kv_cache_num_tokens + _SPARE_KV_NUM_TOKENS
        return options | args

    @staticmethod
    def environment() -> dict[str, str]:
        """Variables for SGLang's processes, which override the user's."""
        return {
            # Logprobs are those of the distribution that tokens are sampled from.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            # It finds cached prefixes by their tokens alone, whatever weights computed them.
            "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": "0",
            # No plan counts logits of a teacher's prompt: 1024 tokens at once, as in vLLM.
            "SGLANG_ENABLE_LOGPROB_CHUNK": "1",
            "SGLANG_LOGPROB_CHUNK_SIZE": "1024",
            # The same in older versions: 0.5.23 does not know these names.
            "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1",
            "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE": "1024",
            # Leaves room for the spare tokens; _check_context_len keeps the model's limit.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }

    def _config_changes(self) -> dict[str, Any]:
        changes = self.config_changes()
        if "text_config" in changes:  # SGLang would replace that part of the config as a whole
            raise ConfigError(
                f"{self.model_path}/config.json ties the head to the embeddings, and the weights "
                "have a head that differs: set tie_word_embeddings to false there, for SGLang"
            )
        return changes

    def _check_context_len(self) -> None:
        config = read_config(self.model_path)
        limit = config.get("max_position_embeddings")
        rope: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
        # SGLang derives a longer limit from a scaled RoPE.
        is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        if isinstance(limit, int) and not is_scaled and self.max_context_len > limit:
            raise ConfigError(
                f"max_context_len={self.max_context_len} exceeds the model's "
                f"max_position_embeddings={limit}"
            )


def _model_overrides(overrides: Any, changes: Mapping[str, Any]) -> str:
    try:
        values: Any = json.loads(overrides)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"pool.engine_args.json_model_override_args is not JSON: {error}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"pool.engine_args.json_model_override_args is not a JSON object: {overrides!r}"
        )
    return json.dumps({**changes, **values, "eos_token_id": None})
