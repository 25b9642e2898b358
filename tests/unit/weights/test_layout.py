"""Manifests, buckets and coverage."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.manifest import (
    ALIGNMENT,
    ITEMSIZES,
    BucketGrid,
    Extent,
    Manifest,
    find_gap,
)

shapes = st.lists(st.integers(0, 9), max_size=3)
specs = st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZES)), shapes), max_size=12)


def make_manifest(drawn: list[tuple[str, list[int]]]) -> Manifest:
    return Manifest.layout((f"t{idx}", dtype, shape) for idx, (dtype, shape) in enumerate(drawn))


@given(specs)
def test_tensors_are_aligned_and_disjoint(drawn: list[tuple[str, list[int]]]) -> None:
    manifest = make_manifest(drawn)

    ends = [0, *(entry.end for entry in manifest.entries)]
    for entry, previous_end in zip(manifest.entries, ends, strict=False):
        assert entry.offset % ALIGNMENT == 0
        assert entry.offset >= previous_end
    assert manifest.nbytes >= ends[-1]
    assert manifest.payload_nbytes == sum(entry.nbytes for entry in manifest.entries)


@given(specs)
def test_a_manifest_survives_the_wire(drawn: list[tuple[str, list[int]]]) -> None:
    manifest = make_manifest(drawn)

    assert Manifest.from_wire(manifest.to_wire()) == manifest


GOOD: dict[str, Any] = {"tensors": [["w", "float32", [2, 2], 0]], "aliases": {}, "nbytes": 256}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tensors": [["w", "float32", [2, 2], 8]]}, "misaligned"),
    ({"tensors": [["w", "float32", [2, 2], 256]]}, "leaves the image"),
    ({"tensors": [["w", "float32", [2, -1], 0]]}, "must be an integer"),
    ({"tensors": [["w", "float32", [2, True], 0]]}, "must be an integer"),
    ({"tensors": [["w", "float33", [2, 2], 0]]}, "unknown dtype"),
    ({"tensors": [["", "float32", [2, 2], 0]]}, "tensor name"),
    ({"tensors": [["w", "float32", [1] * 65, 0]]}, "65 dims"),
    ({"tensors": [["w", "float32", [1 << 40, 1 << 40], 0]]}, "leaves the image"),
    ({"tensors": [["w", "float32", []]]}, "4 fields"),
    ({"tensors": [["w", "int8", [], 0], ["w", "int8", [], 256]], "nbytes": 512}, "distinct"),
    ({"tensors": [["w", "int8", [], 0], ["v", "int8", [], 0]]}, "overlaps"),
    ({"tensors": "w"}, "must be a list"),
    ({"aliases": {"v": "u"}}, "alias"),
    ({"aliases": {"w": "w"}}, "alias"),
    ({"nbytes": -1}, "must be an integer"),
    ({"lora": {"rank": 0, "alpha": 1.0}}, "has a rank and an alpha"),
    ({"lora": {"rank": 1, "alpha": float("nan")}}, "has a rank and an alpha"),
    ({"lora": {"rank": 1, "alpha": 1.0}}, "'w' is no matrix of a LoRA adapter"),
    ({"nbytes": 1 << 60}, "must be an integer"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_manifest_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Manifest.from_wire(msgpack.packb({**GOOD, **change}))


@given(specs, st.integers(1, 6))
def test_buckets_hold_every_byte_once(drawn: list[tuple[str, list[int]]], units: int) -> None:
    manifest = make_manifest(drawn)
    bucket_nbytes = units * ALIGNMENT
    grid = BucketGrid(manifest.nbytes, bucket_nbytes)

    extents = [Extent(key, e.offset, e.nbytes) for key, e in enumerate(manifest.entries)]
    plan = grid.cut(extents)

    assert len(plan) == grid.num_buckets >= 1
    seen: list[tuple[int, int]] = []
    for idx, pieces in enumerate(plan):
        for piece in pieces:
            assert 0 < piece.nbytes <= bucket_nbytes - piece.bucket_start
            offset = extents[piece.key].offset + piece.start
            assert offset == idx * bucket_nbytes + piece.bucket_start
            seen.append((offset, piece.nbytes))
    assert find_gap(manifest, [(offset, nbytes, None) for offset, nbytes in seen]) == ""
    assert sum(nbytes for _, nbytes in seen) == manifest.payload_nbytes


def test_a_bucket_must_be_a_multiple_of_the_alignment() -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        BucketGrid(1000, 300)


def test_an_empty_image_is_one_empty_bucket() -> None:
    assert BucketGrid(0, 256).cut([]) == [[]]


@given(st.data())
def test_a_missing_repeated_or_shifted_region_is_found(data: st.DataObject) -> None:
    manifest = make_manifest([("float32", [40]), ("int8", [0]), ("int8", [7])])
    cuts = sorted(data.draw(st.sets(st.integers(1, 159), max_size=3)))
    bounds = [0, *cuts, 160]
    regions = [(a, b - a, None) for a, b in itertools.pairwise(bounds)] + [(256, 7, None)]
    assert find_gap(manifest, regions) == ""
    victim = data.draw(st.integers(0, len(regions) - 1))
    offset, nbytes, _ = regions[victim]

    fault = data.draw(st.sampled_from(["missing", "repeated", "shifted", "short", "long"]))
    match fault:
        case "missing":
            del regions[victim]
        case "repeated":
            regions.append(regions[victim])
        case "shifted":
            regions[victim] = (offset + 1, nbytes, None)
        case "short":
            regions[victim] = (offset, nbytes - 1, None)
        case _:
            regions[victim] = (offset, nbytes + 1, None)

    assert find_gap(manifest, regions) != ""
