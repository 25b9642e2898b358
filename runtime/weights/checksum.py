"""A fast checksum of tensor bytes that notices order.

Words of 8 bytes are premixed (x ^ x >> 32), multiplied by odd pseudo-random weights of their
place and summed modulo 2^64; the sums of chunks are chained through a 64-bit finaliser together
with the length. One changed word is always noticed (premix and odd factor are invertible); moved
words are noticed but for a chance near 2^-32: without the premix two words that differ in their
top bit only (a sign in bfloat16) could change places unseen. Not cryptographic.

Measured on one core of an AMD EPYC (Zen 5): 8.8 GB/s against 4.3 GB/s of zlib.crc32 (1.2.13) and
1.1 GB/s of a torch sum of int32 in int64. The bytes decide, never the device or the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK_WORDS: Final = 1 << 17
# Words between two chainings. Part of the definition: both sides must agree on it. Chunk, weights
# and scratch (1 MiB each) shall stay in a core's cache; a tenth of it doubles the call overhead.

_CHUNK_NBYTES: Final = 8 * CHUNK_WORDS
_MASK: Final = (1 << 64) - 1

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class Checksummer:
    """Computes checksums. Owns a scratch buffer, so one thread uses it at a time."""

    def __init__(self) -> None:
        self._scratch: U64 = np.empty(CHUNK_WORDS, dtype=np.uint64)
        self._device_weights: dict[torch.device, Tensor] = {}

    def of(self, data: Tensor) -> int:
        """The checksum of `data`: uint8 [N], contiguous, on any device."""
        if data.device.type != "cpu":
            return self._of_device(data)
        state = _start(data.numel())
        for chunk in _chunks(data.numpy()):
            state = _finalise(state ^ self._sum(chunk))
        return state

    def copy(self, source: Tensor, destination: Tensor) -> int:
        """Copies `source` to `destination` (both uint8 [N], on the CPU); the checksum of `source`.

        Chunk by chunk, so that the source is read from memory once.
        """
        state = _start(source.numel())
        chunks = zip(_chunks(source.numpy()), _chunks(destination.numpy()), strict=True)
        for chunk, target in chunks:
            state = _finalise(state ^ self._sum(chunk))
            np.copyto(target, chunk)
        return state

    def _sum(self, chunk: U8) -> int:
        num_words = chunk.size // 8
        words: U64 = chunk[: 8 * num_words].view(np.uint64)
        scratch = self._scratch[:num_words]
        np.right_shift(words, np.uint64(32), out=scratch)
        np.bitwise_xor(words, scratch, out=scratch)
        np.multiply(scratch, _WEIGHTS[:num_words], out=scratch)
        total = int(np.add.reduce(scratch))
        return (total + _tail_term(chunk[8 * num_words :].tobytes(), num_words)) & _MASK

    def _of_device(self, data: Tensor) -> int:
        if data.numel() % 8 or data.storage_offset() % 8:
            padded = data.new_zeros(-(-data.numel() // 8) * 8)
            padded[: data.numel()] = data
        else:
            padded = data
        if data.device not in self._device_weights:
            weights = torch.tensor(_WEIGHTS.view(np.int64)).to(data.device)
            self._device_weights[data.device] = weights
        weights = self._device_weights[data.device]
        sums: list[Tensor] = []
        words = padded.view(torch.int64)
        for start in range(0, words.numel(), CHUNK_WORDS):
            chunk = words[start : start + CHUNK_WORDS]
            mixed = chunk ^ ((chunk >> 32) & 0xFFFFFFFF)
            sums.append((mixed * weights[: chunk.numel()]).sum())
        state = _start(data.numel())
        if sums:
            for total in torch.stack(sums).cpu().numpy():
                state = _finalise(state ^ (int(total) & _MASK))
        return state


def _start(nbytes: int) -> int:
    return _finalise(nbytes)


def _chunks(data: U8) -> Iterator[U8]:
    for start in range(0, data.size, _CHUNK_NBYTES):
        yield data[start : start + _CHUNK_NBYTES]


def _tail_term(tail: bytes, idx: int) -> int:
    """What the last, incomplete word adds: as if filled up with zeros."""
    if not tail:
        return 0
    word = int.from_bytes(tail, "little")
    return (word ^ word >> 32) * int(_WEIGHTS[idx])


def _finalise(state: int) -> int:
    """The 64-bit finaliser of MurmurHash3: invertible, every bit depends on every bit."""
    state ^= state >> 33
    state = state * 0xFF51AFD7ED558CCD & _MASK
    state ^= state >> 33
    state = state * 0xC4CEB9FE1A85EC53 & _MASK
    return state ^ state >> 33


def _make_weights() -> U64:
    """Odd 64-bit numbers from the SplitMix64 sequence, the same in every process."""
    state: Any = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    weights: U64 = (state ^ state >> np.uint64(31)) | np.uint64(1)
    return weights


_WEIGHTS: Final[U64] = _make_weights()
