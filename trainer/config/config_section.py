"""What all sections of a config are made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from umbra.runtime.engine_api.engine_names import ENGINE_TARGETS
from umbra.runtime.engine_api.lora_adapter import LoraAdapter
from umbra.trainer.algorithms.algorithm_names import (
    ADVANTAGE_ESTIMATORS,
    LOSSES,
    unknown_algorithm,
)

T = TypeVar("T")
_LORA_ENGINES: Final = ("vllm", "faulty")  # that one has those of the engine it wraps

Dtype = Literal["float32", "bfloat16", "float64"]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
# Text and TOML have no tuple type, nor one for paths, so these are not checked strictly.
Betas = Annotated[tuple[Share, Share], Field(strict=False)]


def _check_no_nul(value: T) -> T:
    if "\0" in str(value):
        raise ValueError(f"{str(value)!r} holds a NUL character: remove it")
    return value


def _check_no_nul_in_items(items: dict[str, str]) -> dict[str, str]:
    for item in items.items():
        _check_no_nul("=".join(item))
    return items


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


def _check_loss(spec: str) -> str:
    return _check_algorithm("loss", spec, LOSSES)


def _check_advantage(spec: str) -> str:
    return _check_algorithm("advantage estimator", spec, ADVANTAGE_ESTIMATORS)


def _check_algorithm(kind: str, spec: str, registered: Mapping[str, str]) -> str:
    if ":" in spec:
        return _check_function(spec)
    if spec not in registered:
        raise ValueError(unknown_algorithm(kind, spec, registered))
    return spec


def _check_lora_adapters(adapters: dict[str, Path]) -> dict[str, Path]:
    if "" in adapters:
        raise ValueError("a LoRA adapter needs a name")
    return adapters


FilePath = Annotated[Path, Field(strict=False), AfterValidator(_check_no_nul)]
PathText = Annotated[str, AfterValidator(_check_no_nul)]
Variables = Annotated[dict[str, str], AfterValidator(_check_no_nul_in_items)]
FunctionSpec = Annotated[str, AfterValidator(_check_function)]
EngineSpec = Annotated[str, AfterValidator(_check_engine)]
LossSpec = Annotated[str, AfterValidator(_check_loss)]
AdvantageSpec = Annotated[str, AfterValidator(_check_advantage)]
LoraAdapters = Annotated[dict[str, FilePath], AfterValidator(_check_lora_adapters)]


def check_lora_engine(engine: str, adapters: Mapping[str, Path]) -> None:
    """Raises ValueError where umbra's engine of this name knows no LoRA adapters."""
    if adapters and engine in ENGINE_TARGETS.keys() - _LORA_ENGINES:
        raise ValueError(
            f"lora_adapters: engine {engine!r} has no LoRA adapters; use engine 'vllm', or leave "
            "them out"
        )


def lora_settings(adapters: Mapping[str, Path], model_path: Path) -> dict[str, Any]:
    """An engine's settings for its adapters.

    Raises:
        DataError: one cannot be used with this model.
    """
    if not adapters:
        return {}
    for name, path in adapters.items():
        LoraAdapter.read(name, path, model_path)
    return {"lora_adapters": {name: str(path.absolute()) for name, path in adapters.items()}}


def engine_settings(engine: str, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine gets of `pool.engine_args`: a foreign one has options of its own."""
    is_foreign = engine in ("vllm", "sglang")
    return {"engine_args": engine_args} if is_foreign else dict(engine_args)


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
