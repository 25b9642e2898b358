"""Pools beside the policy's, such as a judge: what a config says, and the processes it takes."""

# ruff: noqa: RUF012  pydantic copies defaults

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

from pydantic import model_validator

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.actor.restart_policy import RestartPolicy
from umbra.runtime.engine_api.engine_names import engine_target
from umbra.runtime.errors import DataError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.trainer.config.config_section import (
    Count,
    Dtype,
    EngineSpec,
    FilePath,
    LoraAdapters,
    Positive,
    Seconds,
    Section,
    Variables,
    check_lora_engine,
    engine_settings,
    lora_settings,
)
from umbra.trainer.data.prompt_tokenizer import (
    default_context_len,
    known_stop_token_ids,
    read_model_config,
    vocab_size,
)

if TYPE_CHECKING:
    from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig

T = TypeVar("T")
_NAME: Final = re.compile(r"[A-Za-z0-9_]+")
_TAKEN: Final = ("policy", "worker", "rollouts", "supervisor")
"""Names of other processes."""
_BUSY_WAIT_S: Final = 10.0
"""A judge's requests wait so long for a policy that never runs dry, where nothing else is said."""


class FurtherPoolSection(Section):
    """`[pools.NAME]`: further models beside the policy, such as a judge. Agent loops and reward
    functions ask them by `ctx.pool("NAME")`; the name has letters, digits and `_`.

    Attributes:
        model_path: a Hugging Face model directory with config, safetensors and tokenizer, which the
            engines load by themselves. Training does not change it.
        mode: "colocated": on the GPUs of the policy's engines, awake in turn with them;
            "standalone": on its own, always awake.
        engine: as in [pool].
        count: number of engines.
        dtype: of computation; default `model.dtype`.
        device: "auto" is cuda where the trainer runs on it.
        env: variables for the engines' processes, such as CUDA_VISIBLE_DEVICES.
        max_num_seqs: answers an engine works on at a time.
        max_context_len: longest prompt + answer; default the model's limit, at most 4096.
        kv_cache_num_tokens: size of an engine's KV cache; the engine's choice by default.
        tick_ms: how often engines report new tokens. The end of a request waits for it with vLLM
            only.
        num_threads: CPU threads of an engine; default cores / engines.
        engine_args: as in [pool].
        lora_adapters: LoRA adapters by name, folders as PEFT saves them, of which a question picks
            one: `ctx.pool("judge").generate(tokens, lora="NAME")`. For engine "vllm".
        max_wait_s: of a colocated pool: how long requests wait while the policy has something to
            generate; then it is interrupted, but between the turns of several such pools it has at
            least the shortest of their waits. It goes on later from the tokens so far, whose keys
            have to be computed again. Default: 10 for a standalone policy, which always has
            something, and in `umbra serve`; else as long as the policy has.
        max_turn_s: of a colocated pool: a turn's longest time while the policy has something to
            generate. Without requests it ends at once.
        start_timeout_s: for an engine's start.
        request_timeout_s: for one answer, its waiting for the pool's turn included.
        max_restarts: of one engine within ten minutes; more fail the run.
        memory_limit_mib: host memory of an engine's process, above which it is killed and
            restarted; 0 is no limit.
        hung_limit_s: an engine whose process does not react for so long is killed and restarted.
    """

    model_path: FilePath
    mode: Literal["colocated", "standalone"] = "colocated"
    engine: EngineSpec = "embedded"
    count: Positive = 1
    dtype: Dtype | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    env: Variables = {}
    max_num_seqs: Positive = 256
    max_context_len: Positive | None = None
    kv_cache_num_tokens: Positive | None = None
    tick_ms: Seconds = 50.0
    num_threads: Positive | None = None
    engine_args: dict[str, Any] = {}
    lora_adapters: LoraAdapters = {}
    max_wait_s: Seconds | None = None
    max_turn_s: Seconds = 60.0
    start_timeout_s: Seconds = 600.0
    request_timeout_s: Seconds = 1800.0
    max_restarts: Count = 5
    memory_limit_mib: Count = 0
    hung_limit_s: Seconds = 15.0

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        check_lora_engine(self.engine, self.lora_adapters)
        return self

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        given = sorted({"max_wait_s", "max_turn_s"} & self.model_fields_set)
        if self.mode == "standalone" and given:
            raise ValueError(
                f"{' and '.join(given)} is for mode 'colocated': a standalone pool is always "
                "awake; leave it out, or set mode to 'colocated'"
            )
        return self


def further_pools_problem(pools: Mapping[str, FurtherPoolSection]) -> str:
    """What is wrong with the names, and what to change; "" where nothing is."""
    for name in pools:
        if not _NAME.fullmatch(name):
            return f"pools.{name}: name a pool with letters, digits and '_' only"
        if name in _TAKEN:
            return (
                f"pools.{name}: this name is taken"
                + (" by the pool of the section [pool]" if name == "policy" else "")
                + "; choose another one"
            )
    return ""


def further_pool_specs(
    config: TrainerConfig | ServeConfig, device_type: str, host: str, *, is_host_dry: bool
) -> list[PoolSpec]:
    """The pools.

    Args:
        device_type: the trainer's.
        host: name of the pool that colocated ones take turns with.
        is_host_dry: it has nothing to generate every now and then.
    """
    return [_pool_spec(name, config, device_type, host, is_host_dry) for name in config.pools]


def _pool_spec(
    name: str,
    config: TrainerConfig | ServeConfig,
    device_type: str,
    host: str,
    is_host_dry: bool,
) -> PoolSpec:
    pool = config.pools[name]
    cores = len(os.sched_getaffinity(0))
    kwargs: dict[str, Any] = {
        "model_path": str(pool.model_path.absolute()),
        "dtype": pool.dtype or config.model.dtype,
        "device": device_type if pool.device == "auto" else pool.device,
        "max_num_seqs": pool.max_num_seqs,
        "max_context_len": further_context_len(name, pool),
        "kv_cache_num_tokens": pool.kv_cache_num_tokens,
        "tick_ms": pool.tick_ms,
        "num_threads": pool.num_threads or max(1, cores // pool.count),
        **engine_settings(pool.engine, pool.engine_args),
        **lora_settings(pool.lora_adapters, pool.model_path),
    }
    is_colocated = pool.mode == "colocated"
    max_wait_s = pool.max_wait_s
    if max_wait_s is None and not is_host_dry:
        max_wait_s = _BUSY_WAIT_S
    return PoolSpec(
        name=name,
        engine=engine_target(pool.engine),
        count=pool.count,
        mode=pool.mode,
        kwargs=kwargs,
        env=pool.env,
        load_weights=True,
        shares_with=host if is_colocated else "",
        max_wait_s=max_wait_s if is_colocated else None,
        max_turn_s=pool.max_turn_s,
        restart=RestartPolicy(mode="on_failure", max_restarts=pool.max_restarts, window_s=600.0),
        start_timeout_s=pool.start_timeout_s,
        hung_limit_s=pool.hung_limit_s,
        memory_limit_nbytes=pool.memory_limit_mib << 20,
    )


def generator_spec(name: str, config: TrainerConfig) -> ActorSpec:
    """The actor that user code's requests to a pool go through."""
    return ActorSpec(
        name=_generator_name(name),
        target="umbra.runtime.rollout.dispatch.generator_service:GeneratorService",
        kwargs={"config": further_generator_settings(name, config.pools[name])},
        role="rollout",
    )


def further_generator_settings(name: str, pool: FurtherPoolSection) -> dict[str, Any]:
    """`GeneratorConfig` as a dict."""
    return {
        "pool": name,
        "max_context_len": further_context_len(name, pool),
        "vocab_size": _read(vocab_size, name, pool),
        "max_inflight_per_engine": pool.max_num_seqs,
        # Asleep or not: requests have their own deadline, which is not reached by waiting alone.
        "engine_timeout_s": pool.request_timeout_s,
        "shares_memory": pool.mode == "colocated",
    }


def asked_pools(config: TrainerConfig) -> dict[str, dict[str, Any]]:
    """What rollout workers know of the pools: `AskedPoolConfig` by name."""
    return {
        name: {
            "generator": _generator_name(name),
            "tokenizer_path": str(pool.model_path.absolute()),
            "stop_token_ids": _read(known_stop_token_ids, name, pool),
            "timeout_s": pool.request_timeout_s,
        }
        for name, pool in config.pools.items()
    }


def _generator_name(pool: str) -> str:
    return f"{pool}-generator"


def further_context_len(name: str, pool: FurtherPoolSection) -> int:
    """Longest prompt + answer."""
    return pool.max_context_len or _read(default_context_len, name, pool)


def further_model_config(name: str, pool: FurtherPoolSection) -> dict[str, Any]:
    """config.json of its model. Raises DataError where there is none."""
    return _read(read_model_config, name, pool)


def _read(read: Callable[[Path], T], name: str, pool: FurtherPoolSection) -> T:
    """What the model directory says; errors name the setting that it comes from."""
    try:
        return read(pool.model_path)
    except DataError as error:
        raise DataError(str(error).replace("model.path", path_setting(name))) from error


def path_setting(name: str) -> str:
    """Where the config says which model a pool has."""
    return f"pools.{name}.model_path"
