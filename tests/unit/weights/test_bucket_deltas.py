"""What has changed in a bucket, encoded and applied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.links.bucket_deltas import (
    SentShards,
    apply_delta,
    encode_delta,
    most_nbytes,
)

SHARES = st.sampled_from([0.0, 0.0001, 0.01, 0.2, 0.25, 0.26, 0.5, 1.0])
SEEDS = st.integers(0, 1 << 32)


def random_bytes(rng: np.random.Generator, nbytes: int) -> Tensor:
    made = torch.empty(nbytes, dtype=torch.uint8)
    made.numpy()[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
    return made


def change(rng: np.random.Generator, memory: Tensor, share: float) -> None:
    words = memory[: len(memory) // 2 * 2].view(torch.uint16).numpy()
    places = rng.random(len(words)) < share
    words[places] ^= rng.integers(1, 1 << 16, places.sum(), dtype=np.uint16)


@given(st.integers(0, 300_000), SHARES, SEEDS)
def test_a_delta_makes_the_new_bucket_of_the_old_one(
    num_words: int, share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = random_bytes(rng, 2 * num_words)
    now = before.clone()
    change(rng, now, share)
    places = torch.nonzero(now.view(torch.int16) != before.view(torch.int16)).view(-1)

    apply_delta(before, encode_delta(now, places))

    assert torch.equal(before, now)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 70_000)), max_size=6),
    st.lists(SHARES, min_size=1, max_size=4),
    SEEDS,
    st.booleans(),
)
def test_an_image_that_gets_deltas_and_whole_buckets_has_what_was_sent_last(
    gaps: list[tuple[int, int]], shares: list[float], seed: int, is_in_words: bool
) -> None:
    """Between the runs are bytes of other ranks, which stay as they are."""
    rng = np.random.default_rng(seed)
    runs: list[tuple[int, int]] = []
    end = 0
    for gap, nbytes in gaps:
        unit = 2 if is_in_words else 1
        runs.append((end + (gap + 1) * unit, end + (gap + 1 + nbytes) * unit))
        end = runs[-1][1]
    memory, image = random_bytes(rng, end + 7), random_bytes(rng, end + 7)
    expected = image.clone()
    sent, contents = SentShards(), ""
    for idx, share in enumerate([0.0, *shares]):
        change(rng, memory, share)
        sent.begin(512)
        delta = sent.renew(0, memory, runs)
        has_base = sent.is_base(contents)
        sent.finish(f"sync {idx}")
        contents = f"sync {idx}"

        if has_base and delta is not None:
            assert len(delta) <= most_nbytes(len(memory))
            apply_delta(image, delta)
        else:
            for start, stop in runs:
                image[start:stop] = memory[start:stop]
        for start, stop in runs:
            expected[start:stop] = memory[start:stop]
        assert torch.equal(image, expected)
        assert has_base == (idx > 0)


def test_bits_decide_not_numbers() -> None:
    bits = [0x7FC0, 0x7FC1, 0xFFC0, 0x0000, 0x8000, 0x3F80]  # NaNs, both zeros, 1
    before = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    sent, image = SentShards(), before.clone()
    runs = [(0, len(before))]
    sent.begin(512)
    sent.renew(0, before, runs)
    now = before.view(torch.uint16).clone()
    now[1], now[3] = now[2].clone(), now[4].clone()  # a NaN to another one, 0.0 to -0.0
    delta = encode_delta(now.view(torch.uint8), torch.tensor([1, 3]))

    assert sent.renew(0, now.view(torch.uint8), runs) is None, "it is more than half of the bucket"
    apply_delta(image, delta)

    assert torch.equal(image, now.view(torch.uint8))


def test_an_unchanged_sync_leaves_older_images_as_good_as_the_new_ones() -> None:
    memory = torch.arange(200, dtype=torch.uint8)
    sent = SentShards()
    for contents in ("first", "second"):
        sent.begin(512)
        sent.renew(0, memory, [(0, 200)])
        sent.finish(contents)
    sent.begin(512)
    assert sent.is_base("first")
    assert sent.is_base("second")

    memory[7] += 1
    sent.renew(0, memory, [(0, 200)])
    sent.finish("third")

    sent.begin(512)
    assert [name for name in ("first", "second", "third") if sent.is_base(name)] == ["third"]


@pytest.mark.parametrize("interrupted", ["at once", "half way"])
def test_a_sync_that_does_not_end_leaves_no_base(interrupted: str) -> None:
    memory = torch.zeros(512, dtype=torch.uint8)
    sent = SentShards()
    sent.begin(512)
    for idx in range(2):
        sent.renew(idx, memory, [(0, 512)])
    sent.finish("first")

    sent.begin(512)
    if interrupted == "half way":
        sent.renew(0, memory, [(0, 512)])
    sent.begin(512)

    assert not sent.is_base("first")


def test_buckets_of_another_size_have_no_base() -> None:
    sent = SentShards()
    sent.begin(512)
    sent.renew(0, torch.zeros(512, dtype=torch.uint8), [(0, 512)])
    sent.finish("first")

    sent.begin(1024)

    assert not sent.is_base("first")
    assert sent.renew(0, torch.zeros(1024, dtype=torch.uint8), [(0, 1024)]) is None


def test_no_contents_are_no_base() -> None:
    sent = SentShards()
    sent.begin(512)
    assert not sent.is_base("")


def damaged(delta: Tensor, how: str) -> Tensor:
    words = delta.clone().view(torch.int32)
    match how:
        case "short":
            return delta[:-1]
        case "counts":
            words[1] -= 1
        case "order":
            words[0] = 1 << 20
        case _:  # the place of the last word
            in_block = delta.clone().view(torch.uint16)
            in_block[5] = 65_535
            return in_block.view(torch.uint8)
    return words.view(torch.uint8)


@pytest.mark.parametrize("how", ["short", "counts", "order", "beyond"])
def test_a_delta_that_does_not_fit_is_refused_and_changes_nothing(how: str) -> None:
    memory = torch.zeros(2 * 70_000, dtype=torch.uint8)
    now = memory + 1
    delta = encode_delta(now, torch.tensor([3, 69_999]))  # in two blocks

    with pytest.raises(ProtocolError):
        apply_delta(memory, damaged(delta, how))

    assert not memory.any()
