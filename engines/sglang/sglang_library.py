"""The parts of SGLang that the adapter uses, imported late: SGLang is heavy and optional. Its
objects are `Any`, because SGLang is absent where types are checked."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any, Self

from umbra.engines.shell.library_import import load_library
from umbra.runtime.errors import how_to_install


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLibrary:
    """Classes of SGLang, under SGLang's names.

    Attributes:
        BeginWeightUpdateReqInput, EndWeightUpdateReqInput: None before 0.5.23, which requires them.
        has_stream_interval: whether a request sets how many tokens make a message.
    """

    version: str
    Engine: Any
    ServerArgs: Any
    MultiprocessingSerializer: Any
    GenerateReqInput: Any
    PauseGenerationReqInput: Any
    ContinueGenerationReqInput: Any
    ReleaseMemoryOccupationReqInput: Any
    ResumeMemoryOccupationReqInput: Any
    UpdateWeightsFromTensorReqInput: Any
    BeginWeightUpdateReqInput: Any
    EndWeightUpdateReqInput: Any
    has_stream_interval: bool

    @classmethod
    def load(cls) -> Self:
        return load_library(
            "SGLang",
            "sglang",
            cls._pick,
            missing=how_to_install("sglang"),
        )

    @classmethod
    def _pick(cls, version: str) -> Self:
        def module(name: str) -> Any:
            return importlib.import_module(f"sglang.srt.{name}")

        structs = module("managers.io_struct")
        return cls(
            version=version,
            Engine=module("entrypoints.engine").Engine,
            ServerArgs=module("server_args").ServerArgs,
            MultiprocessingSerializer=module("utils").MultiprocessingSerializer,
            GenerateReqInput=structs.GenerateReqInput,
            PauseGenerationReqInput=structs.PauseGenerationReqInput,
            ContinueGenerationReqInput=structs.ContinueGenerationReqInput,
            ReleaseMemoryOccupationReqInput=structs.ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput=structs.ResumeMemoryOccupationReqInput,
            UpdateWeightsFromTensorReqInput=structs.UpdateWeightsFromTensorReqInput,
            BeginWeightUpdateReqInput=getattr(structs, "BeginWeightUpdateReqInput", None),
            EndWeightUpdateReqInput=getattr(structs, "EndWeightUpdateReqInput", None),
            has_stream_interval=hasattr(
                module("sampling.sampling_params").SamplingParams, "stream_interval"
            ),
        )

    def option_names(self) -> list[str]:
        """ServerArgs is a dataclass in 0.5.17 and none in 0.5.23."""
        return list(inspect.signature(self.ServerArgs).parameters)
