"""Which files of a folder are the model, what is wrong with them, and whether the head is tied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from weight_file import write_weight_file

from umbra.runtime.engine_api.weight_files import WeightFiles, has_own_head, untied
from umbra.runtime.errors import DataError

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write_shards(folder: Path) -> None:
    places = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    write_weight_file(folder / "one.safetensors", {"a": b"1234"})
    write_weight_file(folder / "two.safetensors", {"b": b"12", "c": b"5678"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    "stray", ["model_old", "consolidated", "optimizer", "model-00001-of-00002"]
)
@pytest.mark.parametrize("has_index", [False, True])
def test_files_beside_the_weights_are_none(tmp_path: Path, stray: str, has_index: bool) -> None:
    if has_index:
        write_shards(tmp_path)
    else:
        write_weight_file(tmp_path / "model.safetensors", {"a": b"1234"})
    write_weight_file(tmp_path / f"{stray}.safetensors", {"a": b"9999", "stranger": b"1"})

    stored = WeightFiles(tmp_path)

    names = ["one.safetensors", "two.safetensors"] if has_index else ["model.safetensors"]
    assert [file.name for file in stored.files] == names
    assert "stranger" not in stored.tensors
    assert stored.tensors["a"].file.name == names[0]
    assert stored.strays == ([] if has_index else [f"{stray}.safetensors"])


def test_the_digest_is_of_names_and_contents_and_not_of_files(tmp_path: Path) -> None:
    for name in ("shards", "whole", "other", "renamed"):
        (tmp_path / name).mkdir()
    write_shards(tmp_path / "shards")
    contents = {"c": b"5678", "a": b"1234", "b": b"12"}
    write_weight_file(tmp_path / "whole" / "model.safetensors", contents)
    write_weight_file(tmp_path / "other" / "model.safetensors", {**contents, "b": b"13"})
    renamed = {"d" if name == "a" else name: each for name, each in contents.items()}
    write_weight_file(tmp_path / "renamed" / "model.safetensors", renamed)

    digest = WeightFiles(tmp_path / "shards").digest()

    assert WeightFiles(tmp_path / "whole").digest() == digest
    assert WeightFiles(tmp_path / "other").digest() != digest
    assert WeightFiles(tmp_path / "renamed").digest() != digest


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()

    with pytest.raises(DataError, match=r"index\.json names two\.safetensors, .* download it"):
        WeightFiles(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_weight_file(tmp_path / "two.safetensors", {"b": b"12"})

    with pytest.raises(DataError, match=r"places c in two\.safetensors, which does not have it"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("num_kept", [0, 5, 40, -1])
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, num_kept: int) -> None:
    write_shards(tmp_path)
    file = tmp_path / "two.safetensors"
    file.write_bytes(file.read_bytes()[:num_kept])

    with pytest.raises(DataError, match=rf"^{file} (is no safetensors file|has .* bytes, and its)"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"nonsense", b'{"a": 1}', b'{"a": {"dtype": "U8"}}'])
def test_a_file_with_another_header_is_named(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)

    with pytest.raises(DataError, match=rf"^{file} is no safetensors file"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("index", ["{}", "[]", "{", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(DataError, match=r"index\.json cannot be read"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.safetensors"])
def test_weights_that_are_not_read_are_named(tmp_path: Path, name: str) -> None:
    write_weight_file(tmp_path / name, {"a": b"1"})

    with pytest.raises(DataError, match=rf"has neither .* It has {name}, which umbra does not re"):
        WeightFiles(tmp_path)


def test_an_index_of_other_files_than_the_single_one_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_weight_file(tmp_path / "model.safetensors", {"a": b"1234"})

    with pytest.raises(DataError, match=r"model\.safetensors, and an index that names one\.safete"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("config", "tensors", "is_own"),
    [
        ({"tie_word_embeddings": True}, {EMBEDDINGS: b"12", HEAD: b"13"}, True),
        ({}, {EMBEDDINGS: b"12", HEAD: b"13"}, True),
        (
            {"text_config": {"tie_word_embeddings": True}},
            {"model.language_model.embed_tokens.weight": b"12", HEAD: b"13"},
            True,
        ),
        ({"tie_word_embeddings": True}, {EMBEDDINGS: b"12", HEAD: b"12"}, False),
        ({"tie_word_embeddings": True}, {EMBEDDINGS: b"12"}, False),
        ({"tie_word_embeddings": True}, {HEAD: b"12"}, False),
        ({"tie_word_embeddings": True}, {HEAD: b"12", "model.layers.0.weight": b"34"}, False),
        ({"tie_word_embeddings": False}, {EMBEDDINGS: b"12", HEAD: b"13"}, False),
    ],
)
def test_a_head_of_its_own_is_found(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, bytes], is_own: bool
) -> None:
    write_weight_file(tmp_path / "model.safetensors", tensors)

    assert has_own_head(tmp_path, config) == is_own


def test_a_difference_far_behind_is_found(tmp_path: Path) -> None:
    values = bytes(3_000_000)
    tensors = {EMBEDDINGS: values, HEAD: values[:-1] + b"1"}
    write_weight_file(tmp_path / "model.safetensors", tensors)

    assert has_own_head(tmp_path, {})
    assert untied({"text_config": {}}) == {
        "tie_word_embeddings": False,
        "text_config": {"tie_word_embeddings": False},
    }


def test_without_weights_the_config_counts(tmp_path: Path) -> None:
    assert not has_own_head(tmp_path, {"tie_word_embeddings": True})
