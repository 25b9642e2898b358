"""Facts about umbra's own engines, by short names, without the import of torch or an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast

from umbra.runtime.errors import ConfigError, SettingError
from umbra.runtime.settings import Checked

ENGINE_AWAKE_NBYTES: Final = 2 << 30
"""GPU memory of an awake engine besides weights and KV cache: CUDA context, graphs, buffers.
Measured on an H200 (docs/results/memory-plan-h200.json), where umbra's engines hardly differ."""
ENGINE_ASLEEP_NBYTES: Final = 1 << 30
ANY_LORA_RANK: Final = 1 << 31
"""The rank of an adapter is at most a layer's size."""


MIN_TEMPERATURE: Final = 1e-4
"""Below this, logits divided by the temperature can exceed the range of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Facts about an engine.

    Attributes:
        target: its `module:Class`.
        reads_weight_files: it reads weights from the model's folder, unless a trainer sends them.
        wraps_library: `pool.engine_args` holds options of a library, which the engine takes as
            one argument of that name. Otherwise each entry is an argument of its own.
        parallel_option: the option that is an engine's number of GPUs; "": it has one.
        wraps_engine: the engine starts another one, whose name is the argument `inner`, and
            passes it the other arguments.
        has_lora: the engine takes `lora_adapters`.
        max_lora_rank: largest rank of the LoRA adapters that syncs may bring; 0: none.
        has_known_memory: ENGINE_AWAKE_NBYTES and ENGINE_ASLEEP_NBYTES hold for it.
        measures_free_memory: memory that is free as it starts bounds its KV cache, also a set one.
        share_option: the option that sizes the KV cache by a share of the GPU; "": there is none.
        min_temperature: lowest above 0 (greedy). vLLM raises lower ones to it, and would return
            the logprobs of another distribution.
        truncates_logprobs: with `rollout.top_p` or `top_k`, logprobs are the truncated ones.
        sleeps_by_part: it can free its weights alone, or its KV cache.
        spans_nodes: an engine may have followers on other nodes, which it gets as `followers`.
    """

    target: str
    reads_weight_files: bool = False
    wraps_library: bool = False
    parallel_option: str = ""
    wraps_engine: bool = False
    has_lora: bool = False
    max_lora_rank: int = 0
    has_known_memory: bool = False
    measures_free_memory: bool = False
    share_option: str = ""
    min_temperature: float = MIN_TEMPERATURE
    truncates_logprobs: bool = True
    sleeps_by_part: bool = False
    spans_nodes: bool = False

    def arguments(self, engine_args: Mapping[str, Any]) -> dict[str, Any]:
        return {"engine_args": engine_args} if self.wraps_library else dict(engine_args)

    def tensor_parallel_size(self, engine_args: Mapping[str, Any], section: str = "pool") -> int:
        if self.wraps_engine:
            inner = engine_kind(str(engine_args.get("inner", "embedded")))
            options: object = engine_args.get("engine_args", {})
            if not isinstance(options, Mapping):
                raise ConfigError(
                    f"{section}.engine_args.engine_args: use a table, got {options!r}"
                )
            inner_args = cast("Mapping[str, Any]", options)
            return inner.tensor_parallel_size(inner_args, f"{section}.engine_args")
        size = engine_args.get(self.parallel_option, 1)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{section}.engine_args.{self.parallel_option} must be 1 or more, got {size!r}"
            )
        return size


def engine_kind(engine: str) -> EngineKind:
    """Looks an engine up by its short name. A `module:Class` is assumed to take LoRA adapters; at
    its start it refuses them if it does not."""
    return ENGINES.get(engine) or EngineKind(
        target=engine, has_lora=True, max_lora_rank=ANY_LORA_RANK
    )


ENGINES: Final[Mapping[str, EngineKind]] = {
    "embedded": EngineKind(
        target="umbra.engines.embedded.embedded_engine:EmbeddedEngine",
        reads_weight_files=True,
        max_lora_rank=ANY_LORA_RANK,
        has_known_memory=True,
        sleeps_by_part=True,
    ),
    "vllm": EngineKind(
        target="umbra.engines.vllm.vllm_engine:VllmEngine",
        reads_weight_files=True,
        wraps_library=True,
        parallel_option="tensor_parallel_size",
        has_lora=True,
        max_lora_rank=512,
        has_known_memory=True,
        share_option="gpu_memory_utilization",
        min_temperature=0.01,
        spans_nodes=True,
    ),
    "sglang": EngineKind(
        target="umbra.engines.sglang.sglang_engine:SglangEngine",
        reads_weight_files=True,
        wraps_library=True,
        parallel_option="tp_size",
        max_lora_rank=ANY_LORA_RANK,
        has_known_memory=True,
        measures_free_memory=True,
        share_option="mem_fraction_static",
        truncates_logprobs=False,
        sleeps_by_part=True,
        spans_nodes=True,
    ),
    "echo": EngineKind(target="umbra.engines.echo.echo_engine:EchoEngine"),
    "faulty": EngineKind(
        target="umbra.engines.faulty.faulty_engine:FaultyEngine",
        wraps_engine=True,
        has_lora=True,
        max_lora_rank=ANY_LORA_RANK,
    ),
}


FOLLOWER_TARGET: Final = "umbra.engines.shell.engine_follower:EngineFollower"
"""The `module:Class` of the actor that runs an engine's part on another node."""


def engine_target(engine: str) -> str:
    return engine_kind(engine).target


def check_engine_name(engine: str) -> None:
    if engine not in (*ENGINES, "auto") and ":" not in engine:
        names = ", ".join(map(repr, ("auto", *ENGINES)))
        raise ValueError(
            f"there is no engine {engine!r}; use {names} or the 'module:Class' of another"
        )


def check_lora_engine(engine: str, adapters: Mapping[str, Path]) -> None:
    if adapters and not engine_kind(engine).has_lora:
        raise SettingError(
            f"lora_adapters: engine {engine!r} has no LoRA adapters; use engine 'vllm', or leave "
            "them out"
        )


EngineName = Annotated[str, Checked(check_engine_name)]


def kv_token_nbytes(
    config: Mapping[str, Any], itemsize: int, *, tensor_parallel_size: int = 1
) -> int:
    """Bytes of one token's keys and values in all layers, for one worker's heads, at least one.
    With latent attention (DeepSeek-V2, arXiv:2405.04434) all workers have the same latent vector
    and rotary key."""
    try:
        num_heads = int(config["num_attention_heads"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
        num_layers = int(config["num_hidden_layers"])
        if config.get("kv_lora_rank"):
            latent_size = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
            return num_layers * latent_size * itemsize
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the model's config.json does not give the size of its KV cache ({error!r})"
        ) from None
    num_kv_heads = max(1, num_kv_heads // tensor_parallel_size)
    return 2 * num_layers * num_kv_heads * head_dim * itemsize
