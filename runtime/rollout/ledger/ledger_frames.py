"""Frames of the ledger's files: length, checksum and payload; how the end of a file is judged.

    byte  0  magic     4 bytes
          4  length    uint32, of the payload
          8  checksum  uint64, XXH3-64 of length and payload, seeded with the frame's offset
         16  payload

One frame is one flush, and it is synced before the next one begins. Only the last frame of a file
can therefore be torn; a bad frame with a good one after it is damage, not a crash.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import xxhash

from umbra.runtime.errors import LedgerError

Buffer: TypeAlias = bytes | memoryview

_MAGIC: Final = b"\xd7UL\x01"
_HEAD: Final = struct.Struct("<4sIQ")
_LENGTH: Final = struct.Struct("<I")
HEAD_NBYTES: Final = _HEAD.size
PAYLOAD_MAX_NBYTES: Final = 64 * 1024 * 1024
"""The longest payload that a reader accepts. Lower refuses ordinary flushes; higher makes a damaged
length field cost a long checksum."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The good frames of a file, in order; what follows them is no whole frame."""

    frames: list[tuple[int, memoryview]]  # (offset in the file, payload) of each
    stop: int  # where the last good frame ends


def head_of(chunks: Sequence[Buffer], offset: int) -> bytes:
    """The bytes before a payload (the joined chunks) at byte `offset` of its file."""
    length = sum(map(len, chunks))
    if length > PAYLOAD_MAX_NBYTES:
        raise ValueError(f"a payload has {length} bytes, at most {PAYLOAD_MAX_NBYTES} are allowed")
    return _HEAD.pack(_MAGIC, length, _checksum(chunks, length, offset))


def scan(data: Buffer, path: Path, start: int = 0) -> Scan:
    """Finds the good frames of a file's bytes; payloads are views of `data`. `start` is the
    offset of `data` in the file, at the beginning of a frame. Raises LedgerError if a good frame
    follows a bad one."""
    view = memoryview(data)
    frames: list[tuple[int, memoryview]] = []
    offset = 0
    while (payload := _frame_at(view, offset, start)) is not None:
        frames.append((start + offset, payload))
        offset += HEAD_NBYTES + len(payload)
    if offset < len(view):
        later = _good_frame_after(bytes(view[offset:]), view, offset, start)
        if later is not None:
            raise LedgerError(
                f"{path}: the frame at byte {start + offset} is damaged, and whole frames follow "
                f"from byte {start + later}, so this is not a torn write: restore the file from a "
                "backup (nothing else records what was sampled and trained), or begin a new run in "
                "another folder"
            )
    return Scan(frames, start + offset)


def read_first(path: Path) -> memoryview | None:
    """The payload of a file's first frame; None if it is not good."""
    with path.open("rb") as file:
        head = file.read(HEAD_NBYTES)
        if len(head) < HEAD_NBYTES:
            return None
        length = min(_HEAD.unpack(head)[1], PAYLOAD_MAX_NBYTES)
        return _frame_at(memoryview(head + file.read(length)), 0, 0)


def _frame_at(view: memoryview, offset: int, start: int) -> memoryview | None:
    if len(view) - offset < HEAD_NBYTES:
        return None
    magic, length, checksum = _HEAD.unpack_from(view, offset)
    begin = offset + HEAD_NBYTES
    if magic != _MAGIC or length > min(PAYLOAD_MAX_NBYTES, len(view) - begin):
        return None
    payload = view[begin : begin + length]
    return payload if _checksum((payload,), length, start + offset) == checksum else None


def _good_frame_after(rest: bytes, view: memoryview, offset: int, start: int) -> int | None:
    found = rest.find(_MAGIC, 1)
    while found >= 0:
        if _frame_at(view, offset + found, start) is not None:
            return offset + found
        found = rest.find(_MAGIC, found + 1)
    return None


def _checksum(chunks: Sequence[Buffer], length: int, offset: int) -> int:
    # Seeded with the offset, so that bytes that moved, or a frame inside a payload, do not pass.
    digest = xxhash.xxh3_64(_LENGTH.pack(length), seed=offset)
    for chunk in chunks:
        digest.update(chunk)
    return digest.intdigest()
