"""The checksum notices what goes wrong with copies."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from umbra.runtime.weights.checksum import (
    CastValues,
    add_by_torch,
    checksum_of,
    checksums_of,
    to_checksums,
)

ROW_NBYTES = 4096
CHUNK_NBYTES = 128 * ROW_NBYTES  # what is summed at once
MASK = (1 << 64) - 1


def random_bytes(nbytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def checksum(data: bytes) -> int:
    return checksum_of(torch.tensor(list(data), dtype=torch.uint8))


def coefficient(number: int) -> int:
    mixed = (number ^ number >> 27) * 0x3C79AC492BA7B653 & MASK
    mixed = (mixed ^ mixed >> 33) * 0x1C69B3F74AC4AE35 & MASK
    return (mixed ^ mixed >> 27) | 1


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 4099, CHUNK_NBYTES + 4094])
def test_words_are_summed_with_the_coefficients_of_their_rows_and_columns(nbytes: int) -> None:
    data = random_bytes(nbytes)

    expected = nbytes
    filled = data.numpy().tobytes() + bytes(-nbytes % 4)
    for place, word in enumerate(array("I", filled)):
        row, column = divmod(place, 1024)
        expected += word * coefficient(1025 + row) * coefficient(1 + column)

    assert checksum_of(data) == expected & MASK


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


@given(st.binary(max_size=64), st.integers(0, 15))
def test_the_address_in_memory_does_not_matter(content: bytes, offset: int) -> None:
    data = torch.zeros(offset + len(content), dtype=torch.uint8)
    data[offset:] = torch.tensor(list(content), dtype=torch.uint8)

    assert checksum_of(data[offset:]) == checksum(content)


@given(st.integers(1, 12), st.integers(0, 9), st.data())
def test_moved_and_repeated_rows_are_noticed(
    num_rows: int, extra_nbytes: int, data: st.DataObject
) -> None:
    content = random_bytes(num_rows * ROW_NBYTES + extra_nbytes)
    source, target = data.draw(
        st.tuples(*2 * [st.integers(0, len(content) - 8)]).filter(lambda two: two[0] != two[1])
    )
    moved = content.clone()
    nbytes = min(ROW_NBYTES, len(content) - max(source, target))

    moved[target : target + nbytes] = content[source : source + nbytes]

    assert checksum_of(moved) != checksum_of(content)


def test_a_tensor_has_the_checksum_of_its_bytes_however_it_is_strided_and_once_it_is_cast() -> None:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(33, 65, generator=generator)
    tensors = [values, values.t(), values[1:, ::2], values[5], values[3, 4]]

    found = checksums_of([CastValues(tensor, torch.bfloat16) for tensor in tensors], num_threads=2)

    for tensor, checksum in zip(tensors, found, strict=True):
        content = tensor.bfloat16().reshape(-1).contiguous()
        assert checksum == checksum_of(content.clone().view(torch.uint8))


def test_torch_computes_the_same_where_there_is_no_kernel() -> None:
    words = [random_bytes(nbytes).view(torch.int32) for nbytes in (16, 4096, (16 << 20) + 4112)]
    floats = [torch.randn(4100), torch.zeros(4)]

    sums = torch.tensor([3, *(data.nbytes for data in words)])
    add_by_torch(dict(enumerate(words, 1)), sums)
    sums_of_floats = torch.tensor([2 * data.numel() for data in floats])
    add_by_torch(dict(enumerate(floats)), sums_of_floats)

    assert to_checksums(sums) == [3, *map(checksum_of, words)]
    assert to_checksums(sums_of_floats) == [checksum_of(data.bfloat16()) for data in floats]
