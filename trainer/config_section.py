"""What all sections of a config are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from umbra.runtime.engine_names import ENGINE_TARGETS

Dtype = Literal["float32", "bfloat16", "float64"]
# Text and TOML have no path or tuple type, so these two are not checked strictly.
FilePath = Annotated[Path, Field(strict=False)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Share, Share], Field(strict=False)]


def _check_function(spec: str) -> str:
    module, colon, function = spec.partition(":")
    parts = [*module.split("."), *function.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ValueError(f"a function is written as 'module:function', got {spec!r}")
    return spec


def _check_engine(spec: str) -> str:
    if spec not in ENGINE_TARGETS and ":" not in spec:
        names = ", ".join(repr(name) for name in ENGINE_TARGETS)
        raise ValueError(
            f"there is no engine {spec!r}; use {names} or the 'module:Class' of another"
        )
    return spec


FunctionSpec = Annotated[str, AfterValidator(_check_function)]
EngineSpec = Annotated[str, AfterValidator(_check_engine)]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
