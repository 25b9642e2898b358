"""The checksum notices what goes wrong with copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.weights.checksum import checksum_of, copy_with_checksum

CHUNK_NBYTES = 1 << 18  # of the copy
STAGING_NBYTES = 16 << 20  # of what comes from a GPU


def checksum(data: bytes) -> int:
    return checksum_of(torch.tensor(list(data), dtype=torch.uint8))


@given(st.binary(min_size=1, max_size=100), st.data())
def test_one_changed_byte_is_noticed(content: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))

    changed = bytes(b ^ flip if i == place else b for i, b in enumerate(content))

    assert checksum(changed) != checksum(content)


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=20), st.data())
def test_exchanged_words_are_noticed(words: list[bytes], data: st.DataObject) -> None:
    first, second = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2))
    moved = list(words)
    moved[first], moved[second] = moved[second], moved[first]

    is_same = checksum(b"".join(moved)) == checksum(b"".join(words))

    assert is_same == (moved == words)


@given(st.binary(max_size=40), st.integers(1, 9))
def test_trailing_zeros_are_noticed(content: bytes, num_zeros: int) -> None:
    assert checksum(content) != checksum(content + bytes(num_zeros))


def test_exchanged_signs_of_bfloat16_are_noticed() -> None:
    signs = torch.ones(4096, dtype=torch.bfloat16)
    signs[3] = -1  # the top bit of a word, which a plain weighted sum can lose
    moved = signs.roll(8)

    before, after = (checksum_of(t.view(torch.uint8)) for t in (signs, moved))

    assert before != after


def test_exchanged_rows_of_an_identity_matrix_are_noticed() -> None:
    eye = torch.eye(1024, dtype=torch.float64)
    swapped = eye[[1, 0, *range(2, 1024)]]

    before, after = (checksum_of(t.reshape(-1).view(torch.uint8)) for t in (eye, swapped))

    assert before != after


@pytest.mark.parametrize("extra_nbytes", [0, 1, 8, 11])
def test_exchanged_chunks_are_noticed(extra_nbytes: int) -> None:
    chunk_nbytes = CHUNK_NBYTES
    generator = torch.Generator().manual_seed(7)
    data = torch.randint(
        0, 256, (3 * chunk_nbytes + extra_nbytes,), dtype=torch.uint8, generator=generator
    )
    moved = data.clone()
    moved[:chunk_nbytes], moved[chunk_nbytes : 2 * chunk_nbytes] = (
        data[chunk_nbytes : 2 * chunk_nbytes],
        data[:chunk_nbytes],
    )

    assert checksum_of(moved) != checksum_of(data)


@given(st.binary(max_size=64), st.integers(0, 15))
def test_the_address_in_memory_does_not_matter(content: bytes, offset: int) -> None:
    data = torch.zeros(offset + len(content), dtype=torch.uint8)
    data[offset:] = torch.tensor(list(content), dtype=torch.uint8)

    assert checksum_of(data[offset:]) == checksum(content)


@pytest.mark.parametrize("nbytes", [0, 5, CHUNK_NBYTES, CHUNK_NBYTES + 13])
def test_copy_copies_and_sums_the_source(nbytes: int) -> None:
    generator = torch.Generator().manual_seed(nbytes)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    destination = torch.zeros(nbytes, dtype=torch.uint8)

    value = copy_with_checksum(source, destination)

    assert value == checksum_of(source)
    assert torch.equal(source, destination)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nbytes", [0, 5, CHUNK_NBYTES, 2 * STAGING_NBYTES + 13])
def test_a_gpu_computes_the_same(nbytes: int) -> None:
    generator = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes + 1,), dtype=torch.uint8, generator=generator)

    on_gpu = data.cuda()

    assert checksum_of(on_gpu[:nbytes]) == checksum_of(data[:nbytes])
    assert checksum_of(on_gpu[1:]) == checksum_of(data[1:])
