"""Chooses the settings that a config leaves to the machine. Loads no torch, for which a start would
wait a second. The memory plan chooses others later (`plan_job_memory`).

    model.dtype = "auto"   bfloat16 where the trainer runs on a GPU, float32 on the CPU
    pool.engine = "auto"   vLLM, else SGLang, where it runs on a GPU and the library is installed,
                           else the embedded engine
    train.compile = "auto" true for a model that is not small, on a GPU, where torch can compile
"""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from umbra.runtime.cluster.environment import visible_gpus
from umbra.runtime.engine_api.pool_settings import EnginePoolSettings
from umbra.runtime.engine_api.weight_files import WeightFiles
from umbra.runtime.errors import ConfigError, DataError
from umbra.runtime.package_versions import is_installed
from umbra.runtime.process.nvml import count_gpus
from umbra.trainer.config.setting_rules import refusals
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig
from umbra.trainer.services.pool_specs import engine_device

_LIBRARIES: Final = ("vllm", "sglang")
_COMPILED_MIN_PARAMETERS: Final = 500_000_000
"""From this size on, "auto" compiles. Smaller models save too little in a step for what the first
one takes: 28 ms of 191 for 53 s with SmolLM2-135M on an H200."""
Choices = dict[str, str | bool]
"""A value for each setting, by its name."""
_Config = TypeVar("_Config", TrainerConfig, ServeConfig)
_Pool = TypeVar("_Pool", bound=EnginePoolSettings)


def with_chosen_settings(config: _Config) -> tuple[_Config, str]:
    """The config with values in place of "auto", and a line that names them, or "". Raises
    ConfigError (SettingError for a setting of an engine's pool) if they do not fit other settings,
    or CUDA_VISIBLE_DEVICES names a GPU that the machine does not have."""
    installed = list(filter(is_installed, _LIBRARIES))
    has_gpu, obstacle = _has_usable_gpu(), ""
    if has_gpu and config.train is not None and config.train.compile == "auto":
        obstacle = compile_obstacle(config.model.path)
    return choose_settings(config, has_gpu=has_gpu, installed=installed, obstacle=obstacle)


def choose_settings(
    config: _Config, *, has_gpu: bool, installed: Sequence[str], obstacle: str = ""
) -> tuple[_Config, str]:
    """See `with_chosen_settings`. `installed` are libraries of engines, the best first;
    `obstacle` is that of `compile_obstacle`."""
    if config.train is not None and config.train.device == "cpu":
        has_gpu = False
    device = "cuda" if has_gpu else "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if has_gpu else "float32"

    def engine(pool: EnginePoolSettings, dtype: str) -> str:
        # Neither library computes in float64.
        may_be_library = engine_device(pool, device) == "cuda" and dtype != "float64"
        return installed[0] if may_be_library and installed else "embedded"

    choices: Choices = {
        "model.dtype": dtype,
        "pool.engine": engine(config.pool, dtype),
        "train.compile": has_gpu and not obstacle,
    }
    for name, pool in config.pools.items():
        choices[f"pools.{name}.engine"] = engine(pool, pool.dtype or dtype)
    chosen = [name for name, value in settings_left_open(config).items() if value == "auto"]
    listed = ", ".join(f"{name} = {_toml(choices[name])}" for name in chosen)
    if has_gpu and "train.compile" in chosen and obstacle:
        listed += f" ({obstacle})"
    where = "a GPU" if has_gpu else "the CPU"
    return with_choices(config, choices), f"chosen for {where}: {listed}" if listed else ""


def _toml(value: str | bool) -> str:
    return repr(value) if isinstance(value, str) else str(value).lower()


def settings_left_open(config: TrainerConfig | ServeConfig) -> Choices:
    """The settings that may be "auto", by name."""
    pools = {f"pools.{name}.engine": pool.engine for name, pool in config.pools.items()}
    left = {"model.dtype": config.model.dtype, "pool.engine": config.pool.engine, **pools}
    return left | ({"train.compile": config.train.compile} if config.train else {})


def with_choices(config: _Config, choices: Mapping[str, str | bool]) -> _Config:
    """The config with rank 0's values in place of "auto", on every rank: another node may have no
    GPU, or lack a library that no engine there needs. Raises as `with_chosen_settings`."""

    def chosen(name: str, value: str | bool) -> Any:
        return choices[name] if value == "auto" else value

    def settled(section: str, pool: _Pool) -> _Pool:
        return replace(pool, engine=chosen(f"{section}.engine", pool.engine))

    changed: dict[str, Any] = {
        "model": replace(config.model, dtype=chosen("model.dtype", config.model.dtype)),
        "pool": settled("pool", config.pool),
        "pools": {name: settled(f"pools.{name}", pool) for name, pool in config.pools.items()},
    }
    if config.train is not None:
        compiles = chosen("train.compile", config.train.compile)
        changed["train"] = replace(config.train, compile=compiles)
    config = replace(config, **changed)
    if isinstance(config, TrainerConfig) and (rules := refusals(config)):
        raise ConfigError("; ".join(rule.message(config) for rule in rules))
    return config


def _has_usable_gpu() -> bool:
    if not visible_gpus(count_gpus()):
        return False
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    built = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b.*= *['\"]", built, re.MULTILINE) is not None


def compile_obstacle(folder: Path) -> str:
    """Why the model in `folder` is not compiled on this machine's GPUs, or ""."""
    try:
        tensors = WeightFiles(folder).tensors.values()
    except (DataError, OSError) as error:
        return f"the model's size is unknown: {error}"
    if sum(math.prod(tensor.shape) for tensor in tensors) < _COMPILED_MIN_PARAMETERS:
        return "the model is small"
    if shutil.which("g++") is None:
        return "there is no C++ compiler"
    torch = importlib.util.find_spec("torch")
    headers = {"Python": Path(sysconfig.get_path("include"), "Python.h")}
    if torch is not None and torch.origin is not None:
        headers["torch"] = Path(torch.origin).with_name("include")
    missing = [name for name, path in headers.items() if not path.exists()]
    return f"there are no headers of {missing[0]}" if missing else ""
