"""Values survive the wire, and decoders survive whatever else arrives."""

from __future__ import annotations

import math
import struct
import time
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from umbra.runtime.errors import ProtocolError
from umbra.runtime.rpc.wire import (
    CALL,
    CANCEL,
    CREDIT,
    END,
    ERROR,
    FIELD_TYPES,
    FRAME_MIN_NBYTES,
    HELLO,
    ITEM,
    PING,
    REFUSED,
    RESULT,
    WELCOME,
    ActorRef,
    BadEnvelope,
    Decoder,
    Encoder,
    Frame,
    check_envelope,
)

DTYPES = ["?", *"bBhHiIlLqQ", *"efdg", "<i4", ">i4", ">f8", ">u2"]

refs = st.builds(
    ActorRef,
    name=st.text(),
    incarnation=st.integers(0, 2**63),
    node_id=st.text(),
    ipc_endpoint=st.text(),
    tcp_endpoint=st.text(),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | refs
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        np.dtype(dtype),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    )
)


def carry(value: object) -> Any:
    header, frames = Encoder().encode(value)
    (arrived,) = Decoder().decode(header, frames)
    return arrived


def assert_same_array(arrived: Any, sent: Any) -> None:
    assert type(arrived) is np.ndarray
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.tobytes() == sent.tobytes()


@given(values)
def test_plain_values_arrive_as_they_were(value: object) -> None:
    assert carry(value) == value


@given(st.lists(values, max_size=6))
def test_several_values_in_one_header_arrive_in_order(several: list[object]) -> None:
    encoder = Encoder()
    header = b"".join(encoder.encode(value)[0] for value in several)

    assert list(Decoder().decode(header)) == several


def test_tuples_arrive_as_lists_and_nan_as_nan() -> None:
    arrived = carry(((1, (2, 3)), math.nan))

    assert arrived[0] == [1, [2, 3]]
    assert math.isnan(arrived[1])


@given(arrays)
def test_arrays_of_every_type_and_shape_arrive_bit_for_bit(array: Any) -> None:
    assert_same_array(carry({"array": array})["array"], array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_arrays_of_every_type_arrive_bit_for_bit(dtype: str) -> None:
    random = np.random.default_rng(7)
    num_items = FRAME_MIN_NBYTES // np.dtype(dtype).itemsize + 3
    array = random.integers(0, 2, num_items).astype(dtype)

    assert_same_array(carry(array), array)


@given(
    arrays=st.lists(hnp.arrays(np.int16, st.integers(0, 3)), max_size=3),
    num_large=st.integers(0, 3),
)
def test_small_and_large_arrays_mix_in_one_message(arrays: list[Any], num_large: int) -> None:
    large = [np.full(FRAME_MIN_NBYTES, idx, np.uint8) for idx in range(num_large)]
    sent = [part for pair in zip(large, arrays, strict=False) for part in pair] + large

    for arrived, original in zip(carry(sent), sent, strict=True):
        assert_same_array(arrived, original)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(90_000, dtype=np.float32).reshape(300, 300)[::2, ::3],
        np.arange(60_000, dtype=np.int64).reshape(200, 300).T,
        np.arange(9)[::-1],
        np.zeros((0, 7), np.float16),
        np.zeros((3, 0), bool),
        np.array(3.5),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.broadcast_to(np.arange(4), (5000, 4)),
    ],
    ids=["strided", "transposed", "reversed", "empty", "empty bool", "0-d", "fortran", "broadcast"],
)
def test_arrays_of_any_layout_arrive_bit_for_bit(array: Any) -> None:
    assert_same_array(carry(array), array)


def test_a_large_array_is_neither_copied_on_the_way_out_nor_in() -> None:
    array = np.arange(FRAME_MIN_NBYTES, dtype=np.int32)

    header, frames = Encoder().encode([array])
    ((arrived,),) = Decoder().decode(header, frames)

    assert len(header) < 100
    assert np.shares_memory(np.frombuffer(frames[0], np.int32), array)
    assert np.shares_memory(arrived, array)


def test_decoded_arrays_cannot_be_written() -> None:
    for num_items in (3, FRAME_MIN_NBYTES):
        arrived = carry(np.zeros(num_items))
        with pytest.raises(ValueError, match="read-only"):
            arrived[0] = 1


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        object(),
        1 << 64,
        1j,
        np.array(["text"]),
        np.array([object()], dtype=object),
        np.array([1j]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.zeros(3, dtype=[("a", "i4")]),
        "\udc80",
    ],
    ids=lambda value: str(getattr(value, "dtype", type(value).__name__)),
)
def test_what_has_no_wire_form_is_refused_and_leaves_the_encoder_usable(value: object) -> None:
    encoder = Encoder()

    with pytest.raises((TypeError, ValueError, OverflowError)):
        encoder.encode([np.zeros(FRAME_MIN_NBYTES), value])

    header, frames = encoder.encode("fine")
    assert frames == []
    assert list(Decoder().decode(header)) == ["fine"]


def is_wire_value(value: Any) -> bool:
    kind: type[Any] = value.__class__
    if kind is list:
        return all(map(is_wire_value, value))
    if kind is dict:
        return all(type(key) in (str, bytes) for key in value) and is_wire_value([*value.values()])
    if kind is np.ndarray:
        return value.dtype.kind in "biuf"
    plain = (bool, int, float, str, bytes, ActorRef, msgpack.Timestamp)
    return value is None or kind in plain


def decode_or_refuse(header: Frame, frames: list[Frame]) -> list[Any]:
    arrived: list[Any] = []
    try:
        arrived.extend(Decoder().decode(header, frames))
    except ProtocolError:
        return arrived
    return arrived


@settings(max_examples=400)
@given(st.binary(max_size=200), st.lists(st.binary(max_size=64), max_size=2))
def test_garbage_is_plain_data_or_a_protocol_error(header: bytes, frames: list[Frame]) -> None:
    assert is_wire_value(decode_or_refuse(header, frames))


extension_payloads = st.binary(max_size=40) | st.lists(
    st.integers(-5, 2**40)
    | st.text(max_size=8)
    | st.sampled_from(["|O", "<f8", "O8", "f8,f8", "|V3", "<M8[s]", "|S4", "<i4", "?", ""])
    | st.binary(max_size=20)
    | st.lists(st.integers(-3, 2**40), max_size=3),
    max_size=6,
).map(lambda fields: msgpack.packb(fields))


@settings(max_examples=400)
@given(st.integers(-128, 127), extension_payloads, st.lists(st.binary(max_size=64), max_size=2))
def test_malformed_extensions_are_plain_data_or_a_protocol_error(
    code: int, payload: bytes, frames: list[Frame]
) -> None:
    header = struct.pack(">BIb", 0xC9, len(payload), code) + payload

    assert is_wire_value(decode_or_refuse(header, frames))


@given(st.lists(values, min_size=1, max_size=3), st.data())
def test_truncated_headers_are_refused_after_what_was_whole(
    several: list[object], data: st.DataObject
) -> None:
    encoder = Encoder()
    parts = [encoder.encode(value)[0] for value in several]
    header = b"".join(parts)
    length = data.draw(st.integers(0, len(header) - 1))
    ends = [sum(map(len, parts[: idx + 1])) for idx in range(len(parts))]

    arrived: list[Any] = []
    if length in (0, *ends):
        arrived = list(Decoder().decode(header[:length]))
    else:
        with pytest.raises(ProtocolError, match="truncated"):
            arrived.extend(Decoder().decode(header[:length]))

    assert arrived == several[: sum(end <= length for end in ends)]


@given(values, st.integers(1, 20), values)
def test_nothing_of_a_bad_header_reaches_the_next_one(
    first: object, num_missing: int, second: object
) -> None:
    decoder = Decoder()
    cut, _ = Encoder().encode([first])
    whole, _ = Encoder().encode(second)

    with pytest.raises(ProtocolError):
        list(decoder.decode(cut[: max(1, len(cut) - num_missing)]))

    assert list(decoder.decode(whole)) == [second]


def test_a_reader_that_stops_early_leaves_nothing_to_the_next_message() -> None:
    decoder = Decoder()
    header, _ = Encoder().encode("a")

    assert next(decoder.decode(header * 3)) == "a"

    assert list(decoder.decode(b"\x07")) == [7]


@pytest.mark.parametrize(
    "header",
    [
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\x00\x3f\xff\xff" * 500,
        b"\xdf\x00\x3f\xff\xff\xa1a" * 500,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x02",
    ],
    ids=[
        "deep lists", "deep maps", "long deep lists", "long deep maps",
        "list", "map", "text", "bytes", "extension",
    ],
)  # fmt: skip
def test_bombs_are_refused_at_once(header: bytes) -> None:
    before = time.process_time()

    with pytest.raises(ProtocolError):
        list(Decoder().decode(header))

    assert time.process_time() - before < 2.0


def test_an_array_cannot_refer_to_a_frame_that_is_not_there() -> None:
    header, frames = Encoder().encode(np.zeros(FRAME_MIN_NBYTES, np.uint8))

    with pytest.raises(ProtocolError, match="frame 0 of 0"):
        list(Decoder().decode(header, []))
    with pytest.raises(ProtocolError):
        list(Decoder().decode(header, [bytes(frames[0])[:-1]]))


@pytest.mark.parametrize(
    "dtype", [None, 3, ["f8"], {"names": ["a"], "formats": ["f8"]}, "float32", "f8", "f8,f8", "9f8"]
)
def test_only_the_names_of_numbers_reach_numpys_parser_of_dtypes(dtype: object) -> None:
    header = msgpack.packb(msgpack.ExtType(2, msgpack.packb((dtype, [1], bytes(8)))))

    with pytest.raises(ProtocolError, match="only numbers travel"):
        list(Decoder().decode(header))


@pytest.mark.parametrize("incarnation", ["1", 1.0, True, None])
def test_the_incarnation_of_a_reference_is_an_integer(incarnation: object) -> None:
    fields = ("name", incarnation, "node", "ipc://x", "")

    with pytest.raises(ProtocolError, match="malformed actor reference"):
        list(Decoder().decode(msgpack.packb(msgpack.ExtType(1, msgpack.packb(fields)))))


def test_the_call_of_a_bad_envelope_is_known() -> None:
    with pytest.raises(BadEnvelope) as bad:
        list(Decoder().decode(msgpack.packb([RESULT, 4711, {1: "one"}])))

    assert (bad.value.kind, bad.value.call_id) == (RESULT, 4711)


@pytest.mark.parametrize("first_two", [(RESULT, "4711"), ("result", 4711), (RESULT,)])
def test_an_envelope_without_two_integers_belongs_to_no_call(first_two: tuple[object, ...]) -> None:
    header = msgpack.packb([*first_two, {1: "one"}])

    with pytest.raises(ProtocolError) as bad:
        list(Decoder().decode(header))

    assert type(bad.value) is ProtocolError


GOOD_ENVELOPES: list[list[Any]] = [
    [CALL, 1, 1, "method", [], {}, 5000, 0],
    [CANCEL, 1],
    [CREDIT, 1, 8],
    [HELLO],
    [WELCOME, 1, []],
    [RESULT, 1, None],
    [ITEM, 1, {"any": "value"}],
    [END, 1],
    [ERROR, 1, "ValueError", "message", "traceback"],
    [REFUSED, 1, "reason"],
    [PING],
]


def test_every_kind_of_envelope_is_known() -> None:
    assert {envelope[0] for envelope in GOOD_ENVELOPES} == FIELD_TYPES.keys()
    for envelope in GOOD_ENVELOPES:
        assert check_envelope(envelope) is envelope


@pytest.mark.parametrize("good", GOOD_ENVELOPES, ids=repr)
def test_envelopes_with_a_field_too_many_or_too_few_are_refused(good: list[Any]) -> None:
    for bad in (good[:-1], [*good, 1]):
        with pytest.raises(ProtocolError):
            check_envelope(bad)


@given(st.sampled_from(GOOD_ENVELOPES), st.data())
def test_envelopes_with_a_field_of_another_type_are_refused(
    good: list[Any], data: st.DataObject
) -> None:
    idx = data.draw(st.integers(0, len(good) - 1))
    wrong: Any = data.draw(
        st.one_of(st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.none()))
    )
    bad = [*good[:idx], wrong, *good[idx + 1 :]]
    takes_anything = idx > 0 and FIELD_TYPES[good[0]][idx - 1] is object
    if takes_anything or type(wrong) is type(good[idx]):
        assert check_envelope(bad) is bad
    else:
        with pytest.raises(ProtocolError):
            check_envelope(bad)


@pytest.mark.parametrize("bad", [None, 7, "text", {}, [], [None], [[]], [True], [99], [-1], [1.0]])
def test_what_is_no_envelope_is_refused(bad: object) -> None:
    with pytest.raises(ProtocolError):
        check_envelope(bad)


@pytest.mark.parametrize("kind", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_an_envelope_whose_kind_is_nested_deeply_is_refused(kind: bytes) -> None:
    for depth in (1, 100, 500, 900, 1000):
        (envelope,) = Decoder().decode(b"\x91" + kind * depth + b"\x00")

        with pytest.raises(ProtocolError, match="kind must be an integer"):
            check_envelope(envelope)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack(">BI", 0xDB, 1 << 20) + b"\xff" * (1 << 20),
        msgpack.packb(["x" * (1 << 20), 1]),
        msgpack.packb([msgpack.ExtType(2, msgpack.packb(("x" * (1 << 20), [1], b"")))]),
        msgpack.packb([msgpack.ExtType(3, msgpack.packb(("<f4", [1], "x" * (1 << 20))))]),
    ],
    ids=["no UTF-8", "kind", "dtype", "frame"],
)
def test_the_reason_why_a_message_is_bad_does_not_quote_all_of_it(header: bytes) -> None:
    with pytest.raises(ProtocolError) as bad:
        list(map(check_envelope, Decoder().decode(header)))

    assert len(str(bad.value)) < 1000
