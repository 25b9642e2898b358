from __future__ import annotations

import difflib
import importlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from umbra.runtime.engine_api.engine_names import engine_kind
from umbra.runtime.engine_api.lora import LoraBase, check_lora_rank
from umbra.runtime.engine_api.weight_files import has_own_head, local_model, untied
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.package_versions import is_installed, outside_tested_range

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings that every engine takes.

    Attributes:
        kv_cache_num_tokens: for all sequences together. None: the engine's choice.
        tick_ms: time between two deltas, unless a request ends earlier.
        num_threads: threads of operations on the CPU.
        load_weights: whether the engine reads `model_path` and serves as version 0.
        lora_rank: largest rank of the LoRA adapters that syncs bring; 0 if they bring the
            model. The engine keeps the weights of `model_path`, and serves once it has an adapter,
            which it applies to every request.
    """

    model_path: str
    dtype: str = "float32"
    device: str = "cpu"
    max_num_seqs: int = 256
    max_context_len: int
    kv_cache_num_tokens: int | None = None
    tick_ms: float = 50.0
    num_threads: int = 1
    load_weights: bool = False
    lora_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_context_len", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_lora_rank(self.lora_rank, load_weights=self.load_weights)

    @property
    def reads_weights(self) -> bool:
        return self.load_weights or self.lora_rank > 0

    @property
    def lora_base(self) -> LoraBase | None:
        return LoraBase(Path(self.model_path), self.lora_rank) if self.lora_rank else None

    def with_local_model(self) -> Self:
        """The settings with the model's folder, which may have to be downloaded."""
        folder = local_model(self.model_path, with_weights=self.reads_weights)
        return replace(self, model_path=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings(EngineSettings):
    """Settings of a foreign engine; `engine_args` are more options of its library, by name."""

    dtype: str = "bfloat16"
    device: str = "cuda"
    engine_args: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def config_changes(self) -> dict[str, Any]:
        """Changes to config.json, so that the library has the same model as transformers."""
        config = _read_whole_config(self.model_path)
        return untied(config) if has_own_head(Path(self.model_path), config) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanningSettings(AdapterSettings):
    """Settings of an engine that may span nodes; `followers` are the actors of its
    parts elsewhere."""

    kind: ClassVar[str]

    followers: Sequence[str] = ()

    def __post_init__(self) -> None:
        AdapterSettings.__post_init__(self)
        if self.num_workers % self.num_parts:
            raise ConfigError(
                f"{engine_kind(self.kind).parallel_option} {self.num_workers} is no multiple of "
                f"the engine's {self.num_parts} nodes"
            )

    @property
    def num_workers(self) -> int:
        return engine_kind(self.kind).tensor_parallel_size(self.engine_args)

    @property
    def num_parts(self) -> int:
        return 1 + len(self.followers)

    @property
    def num_local_workers(self) -> int:
        """The leading part's workers, which come first."""
        return self.num_workers // self.num_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options for `pool.engine_args`: `own_settings` maps those that are settings of umbra's,
    `fixed` has the reason of those that umbra sets."""

    library: str
    owner: str
    own_settings: Mapping[str, str]
    fixed: Mapping[str, str]

    def check(self, engine_args: Mapping[str, Any], known: Collection[str]) -> None:
        for name in engine_args:
            if name in self.own_settings:
                raise ConfigError(f"pool.engine_args.{name}: set {self.own_settings[name]} instead")
            if name in self.fixed:
                raise ConfigError(f"pool.engine_args.{name} is set by umbra: {self.fixed[name]}")
            if name not in known:
                close = difflib.get_close_matches(name, known, n=3)
                hint = (
                    f"did you mean {' or '.join(close)}?"
                    if close
                    else f"see {self.library}'s {self.owner}"
                )
                raise ConfigError(
                    f"pool.engine_args.{name} is not an option of {self.library}; {hint}"
                )


def read_config(model_path: str) -> dict[str, Any]:
    """The model directory's config.json; for a model with several parts, the text part's."""
    config = _read_whole_config(model_path)
    inner = config.get("text_config")
    return cast("dict[str, Any]", inner) if isinstance(inner, dict) else config


def _read_whole_config(model_path: str) -> dict[str, Any]:
    path = Path(model_path) / "config.json"
    try:
        raw: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return cast("dict[str, Any]", raw)


def load_library(name: str, module: str, pick: Callable[[str], _T], *, missing: str) -> _T:
    """Imports a foreign engine and returns what `pick` makes of its version; warns if untested.
    Raises ConfigError with the remedy, `missing` if it is not installed."""
    if not is_installed(module):
        raise ConfigError(
            f'engine = "{module}" needs {name}, which is not installed here: {missing}'
        )
    try:
        library: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported: {error}") from error
    version = str(library.__version__)
    try:
        picked = pick(version)
    except (ImportError, AttributeError) as error:
        advice = outside_tested_range(module, version) or "reinstall it"
        raise ConfigError(f"{name} {version} lacks what umbra needs: {error}; {advice}") from error
    if warning := outside_tested_range(module, version):
        logger.warning(warning)
    return picked
