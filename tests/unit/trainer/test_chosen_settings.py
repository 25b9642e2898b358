"""The settings that are chosen for the machine."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path

import pytest
from minimal_config import config_with

from umbra.runtime.errors import ConfigError, SettingError
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig
from umbra.trainer.services.chosen_settings import (
    choose_settings,
    compile_obstacle,
    settings_left_open,
    with_choices,
    with_chosen_settings,
)

BOTH = ("vllm", "sglang")


def config_of(overrides: str = "") -> TrainerConfig:
    return config_with(overrides, pools={"judge": {"model_path": "models/judge"}})


@pytest.mark.parametrize(
    ("overrides", "has_gpu", "installed", "dtype", "engine", "judge"),
    [
        ("", True, BOTH, "bfloat16", "vllm", "vllm"),
        ("", True, BOTH[1:], "bfloat16", "sglang", "sglang"),
        ("", True, (), "bfloat16", "embedded", "embedded"),
        ("", False, BOTH, "float32", "embedded", "embedded"),
        ("train.device=cpu", True, BOTH, "float32", "embedded", "embedded"),
        ("pools.judge.device=cpu", True, BOTH, "bfloat16", "vllm", "embedded"),
        ("model.dtype=float32 pool.engine=echo", True, BOTH, "float32", "echo", "vllm"),
        ("model.dtype=float64", True, BOTH, "float64", "embedded", "embedded"),
        (
            "model.dtype=float64 pools.judge.dtype=bfloat16",
            True,
            BOTH,
            "float64",
            "embedded",
            "vllm",
        ),
    ],
)
def test_data_type_and_engines_are_chosen_for_the_machine(
    overrides: str, has_gpu: bool, installed: tuple[str, ...], dtype: str, engine: str, judge: str
) -> None:
    config, _ = choose_settings(config_of(overrides), has_gpu=has_gpu, installed=installed)

    assert config.model.dtype == dtype
    assert config.pool.engine == engine
    assert config.pools["judge"].engine == judge


def test_only_what_was_chosen_is_named() -> None:
    _, line = choose_settings(config_of("pool.engine=vllm"), has_gpu=True, installed=BOTH)
    _, nothing = choose_settings(
        config_of(
            "pool.engine=vllm model.dtype=float32 pools.judge.engine=vllm train.compile=true"
        ),
        has_gpu=True,
        installed=BOTH,
    )

    assert line == (
        "chosen for a GPU: model.dtype = 'bfloat16', pools.judge.engine = 'vllm', "
        "train.compile = true"
    )
    assert nothing == ""


@pytest.mark.parametrize(
    ("overrides", "has_gpu", "obstacle", "compiles"),
    [
        ("", True, "", True),
        ("", True, "there is no C++ compiler", False),
        ("train.compile=true", True, "there is no C++ compiler", True),
        ("train.compile=false", True, "", False),
        ("", False, "", False),
        ("train.device=cpu", True, "", False),
    ],
)
def test_what_a_gpu_computes_is_compiled_where_that_is_possible(
    overrides: str, has_gpu: bool, obstacle: str, compiles: bool
) -> None:
    config = config_of(overrides)

    chosen, line = choose_settings(config, has_gpu=has_gpu, installed=(), obstacle=obstacle)

    assert chosen.train.compile is compiles
    is_told = obstacle in line if obstacle else "(" not in line
    assert is_told is not overrides.startswith("train.compile=true")


def test_an_engine_that_does_not_fit_its_pool_is_refused_when_it_is_chosen() -> None:
    config = config_of("pool.mode=standalone pool.staged_updates=true")

    chosen, _ = choose_settings(config, has_gpu=True, installed=BOTH)

    assert chosen.pool.engine == "vllm"
    with pytest.raises(SettingError, match=r"staged_updates is for engine 'vllm', and .*embedded"):
        choose_settings(config, has_gpu=False, installed=BOTH)


def test_an_engine_that_does_not_fit_other_settings_is_refused_when_it_is_chosen() -> None:
    config = config_of("rollout.top_p=0.9")

    choose_settings(config, has_gpu=True, installed=BOTH)

    with pytest.raises(ConfigError, match=r"pool\.engine = 'sglang' and rollout\.top_p = 0\.9"):
        choose_settings(config, has_gpu=True, installed=BOTH[1:])


def test_a_node_takes_the_choices_of_rank_0_whatever_it_has_itself() -> None:
    config = config_of("pools.judge.engine=echo")
    of_rank_0, _ = choose_settings(config, has_gpu=True, installed=BOTH)

    elsewhere = with_choices(config, settings_left_open(of_rank_0))

    assert elsewhere == of_rank_0
    assert settings_left_open(elsewhere) == {
        "model.dtype": "bfloat16",
        "pool.engine": "vllm",
        "pools.judge.engine": "echo",
        "train.compile": True,
    }
    with pytest.raises(ConfigError, match=r"pool\.engine = 'sglang' and rollout\.top_p = 0\.9"):
        with_choices(
            config_of("rollout.top_p=0.9"),
            settings_left_open(of_rank_0) | {"pool.engine": "sglang"},
        )


def test_what_a_config_serves_is_chosen_without_a_trainer() -> None:
    config = check_config(ServeConfig, {"model": {"path": "models/tiny"}}, "config")

    chosen, _ = choose_settings(config, has_gpu=True, installed=BOTH)

    assert (chosen.model.dtype, chosen.pool.engine) == ("bfloat16", "vllm")


def test_a_machine_without_a_gpu_has_none_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    config, line = with_chosen_settings(config_of())

    assert config.model.dtype == "float32"
    assert line.startswith("chosen for the CPU: ")


@pytest.mark.parametrize(
    ("num_rows", "obstacle"),
    [(499_999, "the model is small"), (500_000, ""), (0, "the model's size is unknown")],
)
def test_small_models_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int, obstacle: str
) -> None:
    monkeypatch.setattr(shutil, "which", str)  # there is a compiler, and headers
    monkeypatch.setattr(sysconfig, "get_path", {"include": str(tmp_path)}.get)
    (tmp_path / "Python.h").touch()
    nbytes = 2 * num_rows * 1000
    tensor = {"dtype": "BF16", "shape": [num_rows, 1000], "data_offsets": [0, nbytes]}
    header = json.dumps({"weight": tensor}).encode()
    if num_rows:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + nbytes)

    found = compile_obstacle(tmp_path)

    assert found.partition(":")[0] == obstacle
