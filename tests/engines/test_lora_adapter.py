"""Folders of LoRA adapters: read without their weights, and wrong ones named."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_factory import save_adapter, write_adapter
from safetensors.torch import load_file
from torch import Tensor, ones

from umbra.runtime.errors import DataError
from umbra.runtime.lora_adapter import LoraAdapter

Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
LATER = "base_model.model.model.layers.7.self_attn.q_proj.lora_"


def change(
    folder: Path,
    config: Callable[[dict[str, Any]], object] = lambda config: None,
    tensors: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
) -> Path:
    """An adapter of rank 4 with something wrong."""
    save_adapter(folder, "qwen3", seed=1)
    said = json.loads((folder / "adapter_config.json").read_text())
    held = load_file(folder / "adapter_model.safetensors")
    config(said)
    tensors(held)
    write_adapter(folder, said, held)
    return folder


def test_an_adapter_of_the_model_is_read(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "a", "qwen3", seed=1, rank=6)

    adapter = LoraAdapter.read("a", path, model_folder("qwen3"))

    assert adapter == LoraAdapter(name="a", path=path, rank=6)


def test_ranks_may_differ_where_the_adapter_says_so(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    def one_larger(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.lora_A.weight"] = torch.zeros(9, 48)
        tensors[f"{Q_PROJ}.lora_B.weight"] = torch.zeros(128, 9)

    pattern = {"rank_pattern": {"layers.1.self_attn.q_proj": 9}}
    path = change(tmp_path / "a", lambda config: config.update(pattern), one_larger)

    assert LoraAdapter.read("a", path, model_folder("qwen3")).rank == 9
    change(tmp_path / "a", tensors=one_larger)
    with pytest.raises(DataError, match=r"says r 4, its matrices \[4, 9\]"):
        LoraAdapter.read("a", path, model_folder("qwen3"))


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        (lambda c: c.update(peft_type="IA3"), lambda t: None, "peft_type 'IA3', not 'LORA'"),
        (lambda c: c.update(r=8), lambda t: None, r"says r 8, its matrices \[4\]"),
        (lambda c: None, lambda t: t.clear(), "holds no lora_A and lora_B"),
        (lambda c: None, lambda t: t.pop(f"{Q_PROJ}.lora_B.weight"), "lora_B is not there"),
        (
            lambda c: None,
            lambda t: t.update({f"{LATER}A.weight": ones(4, 48), f"{LATER}B.weight": ones(8, 4)}),
            r"the model has no model\.layers\.7\.self_attn\.q_proj",
        ),
    ],
)
def test_a_wrong_adapter_is_named_with_what_is_wrong(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    config: Callable[[dict[str, Any]], object],
    tensors: Callable[[dict[str, Tensor]], object],
    text: str,
) -> None:
    path = change(tmp_path / "a", config, tensors)

    with pytest.raises(DataError, match=rf"LoRA adapter 'a': .*{text}"):
        LoraAdapter.read("a", path, model_folder("qwen3"))


def test_an_adapter_of_another_size_of_model_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = save_adapter(tmp_path / "a", "qwen3-wide", seed=1)

    with pytest.raises(DataError, match=r"is \(48, 80\) in the model and \(256, 512\) in the"):
        LoraAdapter.read("a", path, model_folder("qwen3"))


def test_a_folder_that_is_none_of_an_adapter_is_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"adapter_config\.json"):
        LoraAdapter.read("a", tmp_path / "nowhere", model_folder("qwen3"))

    path = save_adapter(tmp_path / "a", "qwen3", seed=1)
    (path / "adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(DataError, match="is no safetensors file"):
        LoraAdapter.read("a", path, model_folder("qwen3"))
