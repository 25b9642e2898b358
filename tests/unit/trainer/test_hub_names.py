"""Which settings name something on the hub, and what."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbra.runtime.engine_api.weight_files import local_model, snapshot_name
from umbra.trainer.data.hub_paths import HubName, data_name, model_name


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName(repo="Qwen/Qwen3-0.6B", revision=None)),
        ("Qwen/Qwen3-0.6B@v1.0", HubName(repo="Qwen/Qwen3-0.6B", revision="v1.0")),
        ("Qwen3-0.6B", None),
        ("models/Qwen/Qwen3-0.6B", None),
        ("/models/Qwen3-0.6B", None),
        ("../Qwen3-0.6B", None),
    ],
)
def test_a_model_is_named_by_owner_and_name(path: str, name: HubName | None) -> None:
    assert model_name(Path(path)) == name


@pytest.mark.parametrize(
    ("path", "subset", "split"),
    [
        ("openai/gsm8k", "", "train"),
        ("openai/gsm8k:test", "", "test"),
        ("openai/gsm8k/main", "main", "train"),
        ("openai/gsm8k@740312a/main:train[:100]", "main", "train[:100]"),
    ],
)
def test_a_data_set_may_be_named_with_configuration_and_split(
    path: str, subset: str, split: str
) -> None:
    name = data_name(Path(path), "train")

    assert name is not None
    assert (name.repo, name.subset, name.split) == ("openai/gsm8k", subset, split)
    assert name.revision == ("740312a" if "@" in path else None)


def test_files_are_no_names_of_data_sets() -> None:
    assert data_name(Path("data/train.jsonl"), "train") is None
    assert data_name(Path("data/train.parquet"), "train") is None


def test_what_exists_here_is_no_name() -> None:
    Path("Qwen/Qwen3-0.6B").mkdir(parents=True)

    assert model_name(Path("Qwen/Qwen3-0.6B")) is None
    assert data_name(Path("Qwen/Qwen3-0.6B"), "train") is None


def test_a_snapshot_tells_its_name_and_what_it_has_is_not_fetched() -> None:
    snapshot = Path("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de")
    assert snapshot_name(snapshot) == "Qwen/Qwen3-0.6B"
    assert snapshot_name(Path("models/Qwen3-0.6B")) == ""

    snapshot.mkdir(parents=True)
    assert local_model(str(snapshot), with_weights=False) == str(snapshot)
    (snapshot / "model.safetensors").touch()
    assert local_model(str(snapshot), with_weights=True) == str(snapshot)
