"""Frames: whole ones are read, torn ones are left out, damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger import ledger_frames

PATH = Path("some.log")
PAYLOADS = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def frame_of(payload: bytes, offset: int) -> bytes:
    return ledger_frames.head_of([payload], offset) + payload


def file_of(payloads: list[bytes]) -> tuple[bytes, list[int]]:
    """The bytes of a file, and where each frame begins, the end included."""
    data = b""
    offsets = [0]
    for payload in payloads:
        data += frame_of(payload, len(data))
        offsets.append(len(data))
    return data, offsets


@given(PAYLOADS)
def test_whole_frames_come_back_with_their_offsets(payloads: list[bytes]) -> None:
    data, offsets = file_of(payloads)

    found = ledger_frames.scan(data, PATH)

    assert [(at, bytes(payload)) for at, payload in found.frames] == list(
        zip(offsets, payloads, strict=False)
    )
    assert found.stop == len(data)


@given(PAYLOADS, st.data())
def test_a_truncated_file_loses_only_the_torn_frame(
    payloads: list[bytes], data: st.DataObject
) -> None:
    whole, offsets = file_of(payloads)
    length = data.draw(st.integers(0, len(whole)))

    found = ledger_frames.scan(whole[:length], PATH)

    kept = max(idx for idx, offset in enumerate(offsets) if offset <= length)
    assert [bytes(payload) for _, payload in found.frames] == payloads[:kept]
    assert found.stop == offsets[kept]


@given(PAYLOADS, st.data())
def test_a_flipped_byte_is_damage_before_the_last_frame_and_a_torn_end_in_it(
    payloads: list[bytes], data: st.DataObject
) -> None:
    whole, offsets = file_of(payloads)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))

    if at < offsets[-2]:
        hit = max(offset for offset in offsets if offset <= at)
        with pytest.raises(LedgerError, match=f"some.log: the frame at byte {hit} is damaged"):
            ledger_frames.scan(bytes(flipped), PATH)
    else:
        found = ledger_frames.scan(bytes(flipped), PATH)
        assert [bytes(payload) for _, payload in found.frames] == payloads[:-1]
        assert found.stop == offsets[-2]


@given(st.binary(max_size=100))
def test_garbage_at_the_end_is_a_torn_end(garbage: bytes) -> None:
    whole, _ = file_of([b"one", b"two"])

    found = ledger_frames.scan(whole + garbage, PATH)

    assert len(found.frames) == 2
    assert found.stop == len(whole)


def test_a_frame_quoted_in_a_torn_payload_is_no_frame_of_the_file() -> None:
    quoted = frame_of(b"I am a whole frame", 0)
    whole, offsets = file_of([b"first", quoted + b"more"])

    found = ledger_frames.scan(whole[:-1], PATH)

    assert found.stop == offsets[1]


def test_a_frame_at_another_offset_is_not_accepted() -> None:
    whole, offsets = file_of([b"first", b"second", b"third"])
    moved = whole[offsets[1] : offsets[2]] + whole[: offsets[1]] + whole[offsets[2] :]

    with pytest.raises(LedgerError, match="damaged"):
        ledger_frames.scan(moved, PATH)


def test_chunks_are_one_payload() -> None:
    assert ledger_frames.head_of([b"ab", b"", b"c"], 7) == ledger_frames.head_of([b"abc"], 7)


def test_a_payload_longer_than_readers_believe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_frames, "PAYLOAD_MAX_NBYTES", 10)

    with pytest.raises(ValueError, match="11 bytes, at most 10"):
        ledger_frames.head_of([b"x" * 11], 0)
