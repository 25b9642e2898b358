"""vLLM as an engine actor: umbra's protocol over AsyncLLM.

Target `umbra.engines.vllm.actor:VllmEngine`. Draws depend on where a trajectory was cut, so only
greedy ones go on token for token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from umbra.engines.adapter.actor import AdapterEngine
from umbra.engines.vllm.core import VllmCore
from umbra.engines.vllm.settings import VllmSettings


class VllmEngine(AdapterEngine):
    """See `VllmSettings` for the settings; `tick_ms` is the time between two deltas."""

    def __init__(
        self,
        *,
        model_path: str,
        dtype: str = "bfloat16",
        device: str = "cuda",
        max_num_seqs: int = 256,
        max_context_len: int,
        kv_cache_num_tokens: int | None = None,
        tick_ms: float = 50.0,
        num_threads: int = 1,
        load_weights: bool = False,
        engine_args: Mapping[str, Any] | None = None,
        lora_adapters: Mapping[str, str] | None = None,
    ) -> None:
        settings = VllmSettings(
            model_path=model_path,
            dtype=dtype,
            device=device,
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            kv_cache_num_tokens=kv_cache_num_tokens,
            num_threads=num_threads,
            load_weights=load_weights,
            engine_args=dict(engine_args or {}),
            lora_adapters=dict(lora_adapters or {}),
        )
        super().__init__(
            VllmCore(settings),
            max_num_seqs=max_num_seqs,
            max_context_len=max_context_len,
            tick_ms=tick_ms,
            load_weights=load_weights,
        )
