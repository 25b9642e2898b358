"""Pools beside the policy's, such as a judge: what a config says of them."""

# ruff: noqa: RUF012  pydantic copies defaults

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import model_validator

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
)

_NAME: Final = re.compile(r"[A-Za-z0-9_]+")
_TAKEN: Final = ("policy", "worker", "rollouts", "supervisor")
"""Names of other processes."""


class AuxiliaryPoolSection(Section):
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


def auxiliary_pools_problem(pools: Mapping[str, AuxiliaryPoolSection]) -> str:
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
