"""The changes of a bucket since the last sync: positions and values, as bits.

A delta counts in words of 16 bits, whatever the dtypes of the tensors are. It consists of

    ends      int32 [blocks]     number of changed words up to the end of each block of 65,536
    places    uint16 [changed]   of the changed words, in their block
    values    16 bits [changed]  that the words have now

so that a changed bfloat16 takes four bytes instead of two. Nothing is added or rounded: the words
are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.shards import flatten

_WORD_NBYTES: Final = 2
_BLOCK_WORDS: Final = 1 << 16
_END_NBYTES: Final = 4
_CHANGE_NBYTES: Final = 2 * _WORD_NBYTES
_LARGEST_SHARE: Final = 0.5
# Largest share of a bucket's bytes for its delta. Larger ones save little of the network and take
# longer to be made and applied than the bucket to be copied; smaller ones send more whole buckets.

Runs = Sequence[tuple[int, int]]
"""The first byte of each run in its bucket, and the byte behind it."""


class SentShards:
    """A copy of the shards that a rank sent last, as they travel, so that it can send the changes.

    Each sync has a name for the contents that it writes to images. This object knows the contents
    that equal its copy byte for byte: several if nothing had changed between two syncs, none while
    a sync is in progress or after one that did not reach its end.
    """

    def __init__(self) -> None:
        self._contents: frozenset[str] = frozenset()
        self._before: frozenset[str] = frozenset()  # as the sync in progress began
        self._bucket_nbytes = 0
        self._buckets: dict[int, Tensor] = {}
        self._has_changed = False

    def begin(self, bucket_nbytes: int) -> None:
        """Begins a sync, in which `renew` is called for each bucket."""
        if bucket_nbytes != self._bucket_nbytes:
            self.clear()
        self._bucket_nbytes = bucket_nbytes
        self._before, self._contents = self._contents, frozenset()
        self._has_changed = False

    def is_base(self, contents: str) -> bool:
        """Whether the deltas of this sync apply to an image with these contents."""
        return contents in self._before

    def renew(self, idx: int, memory: Tensor, runs: Runs) -> Tensor | None:
        """Copies the runs of a bucket, whose memory is uint8 [bucket_nbytes]; returns their
        changes: uint8 [nbytes]. None if the whole bucket takes little more."""
        kept = self._buckets.get(idx)
        if kept is None:
            self._has_changed = True
            self._buckets[idx] = torch.cat(
                [memory[start:stop] for start, stop in runs] or [memory[:0]]
            )
            return None
        places = _changed_words(memory, kept, runs)
        if places is not None and not len(places):
            return encode_delta(memory, places)
        self._has_changed = True
        offset = 0
        for start, stop in runs:
            kept[offset : offset + stop - start] = memory[start:stop]
            offset += stop - start
        if places is None or len(places) * _CHANGE_NBYTES > len(kept) * _LARGEST_SHARE:
            return None
        return encode_delta(memory, places)

    def finish(self, contents: str) -> None:
        before = frozenset[str]() if self._has_changed else self._before
        self._contents = before | {contents}

    def clear(self) -> None:
        self._contents = self._before = frozenset()
        self._buckets = {}


def encode_delta(memory: Tensor, places: Tensor) -> Tensor:
    """The delta of a bucket, uint8 [nbytes], on its device. `memory` is uint8 [bucket_nbytes],
    `places` of its changed words int64 [changed], ascending."""
    block_ends = torch.arange(1, _num_blocks(len(memory)) + 1, device=places.device) * _BLOCK_WORDS
    ends = torch.searchsorted(places, block_ends).to(torch.int32)
    in_block = flatten(places).view(torch.int16)[::4]  # the lowest 16 bits
    parts = [ends, in_block.contiguous(), _words(memory)[places]]
    return torch.cat([flatten(part).view(torch.uint8) for part in parts])


def apply_delta(memory: Tensor, delta: Tensor) -> None:
    """Overwrites the changed words of a bucket, both on the host. Raises ProtocolError, with
    nothing written, if the delta is not one of such a bucket."""
    num_blocks, words = _num_blocks(len(memory)), _words(memory)
    num_changed, rest = divmod(len(delta) - num_blocks * _END_NBYTES, _CHANGE_NBYTES)
    if num_changed < 0 or rest:
        raise ProtocolError(f"{len(delta)} bytes are no delta of a bucket of {len(memory)}")
    data = delta.numpy()
    ends = data[: num_blocks * _END_NBYTES].view(np.int32)
    in_block, values = data[num_blocks * _END_NBYTES :].view(np.uint16).reshape(2, num_changed)
    counts = np.diff(ends, prepend=np.int32(0))
    if counts.min(initial=0) < 0 or counts.sum() != num_changed:
        raise ProtocolError(f"a delta of {num_changed} words has {counts.sum()} in its blocks")
    blocks = np.arange(num_blocks, dtype=np.int64) * _BLOCK_WORDS
    places = np.repeat(blocks, counts) + in_block
    if places.max(initial=-1) >= len(words):
        raise ProtocolError(f"a delta changes word {places.max()} of a bucket of {len(words)}")
    words.view(torch.uint16).numpy()[places] = values


def most_nbytes(bucket_nbytes: int) -> int:
    return _num_blocks(bucket_nbytes) * _END_NBYTES + int(bucket_nbytes * _LARGEST_SHARE)


def _changed_words(memory: Tensor, kept: Tensor, runs: Runs) -> Tensor | None:
    """Places of words in a bucket that differ from the kept runs, one behind the other; None if a
    run does not consist of words."""
    if any(start % _WORD_NBYTES or stop % _WORD_NBYTES for start, stop in runs):
        return None
    found = [torch.empty(0, dtype=torch.int64, device=memory.device)]
    offset = 0
    for start, stop in runs:
        nbytes = stop - start
        now, before = _words(memory[start:stop]), _words(kept[offset : offset + nbytes])
        found.append(_differing(now, before) + start // _WORD_NBYTES)
        offset += nbytes
    return torch.cat(found)


def _differing(one: Tensor, other: Tensor) -> Tensor:
    if one.is_cpu:  # numpy takes a fifth of torch's time
        return torch.as_tensor(np.flatnonzero(one.numpy() != other.numpy()))
    return torch.nonzero(one != other).view(-1)


def _words(data: Tensor) -> Tensor:
    """Whole words as int16; an odd last byte is left out."""
    return flatten(data[: len(data) // _WORD_NBYTES * _WORD_NBYTES]).view(torch.int16)


def _num_blocks(bucket_nbytes: int) -> int:
    return -(-bucket_nbytes // (_BLOCK_WORDS * _WORD_NBYTES))
