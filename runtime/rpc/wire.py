"""The wire format: msgpack values with bounded sizes; numpy arrays travel as raw frames.

One ZMQ message is `[header, frame 0, frame 1, ...]`. The header is one or more msgpack objects,
each an envelope. An array of at least `FRAME_MIN_NBYTES` becomes a frame of its own and is neither
copied nor scanned; smaller ones are inlined. A decoded array is a read-only view of its frame.
Decoding never runs code: there is no pickle, and arrays may only hold numbers.

An envelope is a list whose first element is its kind. Callers send CALL, CANCEL and CREDIT; actors
send RESULT, ITEM, END, ERROR, REFUSED and PING. Each call has exactly one outcome: RESULT, END,
ERROR or REFUSED, or what the caller decides by itself (deadline, cancellation, peer lost).

    [CALL, call_id, incarnation, method, args, kwargs, timeout_ms, credits]
    [CANCEL, call_id]          the caller no longer waits; the callee's task is cancelled
    [CREDIT, call_id, n]       the caller can take n more items of a stream
    [HELLO]                    asks for WELCOME
    [WELCOME, incarnation, idempotent]  names of the methods that may be retried
    [RESULT, call_id, value]
    [ITEM, call_id, value]     one item of a stream
    [END, call_id]             a stream is exhausted
    [ERROR, call_id, type, message, traceback]
    [REFUSED, call_id, reason] never ran: stale incarnation, unknown method
    [PING]                     actor to caller: checks that the caller is still connected

timeout_ms 0 means no deadline (streams only). credits 0 means a plain call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import msgpack

from umbra.runtime.errors import ProtocolError, brief

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CALL: Final = 0
CANCEL: Final = 1
CREDIT: Final = 2
HELLO: Final = 3
WELCOME: Final = 4
RESULT: Final = 5
ITEM: Final = 6
END: Final = 7
ERROR: Final = 8
REFUSED: Final = 9
PING: Final = 10

FIELD_TYPES: Final[dict[int, tuple[type, ...]]] = {
    CALL: (int, int, str, list, dict, int, int),
    CANCEL: (int,),
    CREDIT: (int, int),
    HELLO: (),
    WELCOME: (int, list),
    RESULT: (int, object),
    ITEM: (int, object),
    END: (int,),
    ERROR: (int, str, str, str),
    REFUSED: (int, str),
    PING: (),
}

_EXACT_TYPES: Final = {
    kind: (int, *types) for kind, types in FIELD_TYPES.items() if object not in types
}
_VALUE_KINDS: Final = frozenset({RESULT, ITEM})

# Below this an array is cheaper to copy into the header; far above it, copying costs latency.
FRAME_MIN_NBYTES: Final = 16 * 1024
# One header holds a batch of calls. A larger one almost certainly comes from a faulty peer; a
# smaller limit would refuse legitimate batches of prompts.
HEADER_MAX_NBYTES: Final = 64 * 1024 * 1024
# A single value in a header (string, binary, list, map).
ITEM_MAX_LEN: Final = 32 * 1024 * 1024

# Errors may quote the value that they refer to.
_REASON_MAX_LEN: Final = 300

_EXT_REF: Final = 1
_EXT_ARRAY: Final = 2
_EXT_FRAME_ARRAY: Final = 3
_ARRAY_KINDS: Final = frozenset("biuf")
# numpy also takes descriptions of records, of any length, and parses them as Python literals.
_ARRAY_DTYPE: Final = re.compile(r"[<>|][biuf](1|2|4|8|16)")


class BadEnvelope(ProtocolError):
    """An envelope is malformed, but its call is known, so its sender can get an error."""

    def __init__(self, message: str, kind: int, call_id: int) -> None:
        super().__init__(message, kind, call_id)
        self.message = message
        self.kind = kind
        self.call_id = call_id

    def __str__(self) -> str:
        return self.message


def check_envelope(raw: Any) -> list[Any]:
    """Returns a well-formed envelope. Raises ProtocolError otherwise: `BadEnvelope`
    for a known call."""
    # `type(raw) is not list` would make type checkers treat the items as unknown.
    if raw.__class__ is not list or not raw:
        raise ProtocolError("an envelope must be a non-empty list")
    envelope: list[Any] = raw
    kind = envelope[0]
    if type(kind) is int:
        if kind in _VALUE_KINDS:
            if len(envelope) == 3 and type(envelope[1]) is int:
                return envelope
        elif tuple(map(type, envelope)) == _EXACT_TYPES.get(kind):
            return envelope
        if len(envelope) > 1 and type(envelope[1]) is int:
            raise BadEnvelope(_what_is_wrong(envelope, kind), kind, envelope[1])
    raise ProtocolError(_what_is_wrong(envelope, kind))


def _what_is_wrong(envelope: list[Any], kind: Any) -> str:
    if type(kind) is not int:  # not shown: it may be long, or nested too deeply for `repr`
        return f"an envelope's kind must be an integer, got a {type(kind).__name__}"
    expected = FIELD_TYPES.get(kind)
    if expected is None:
        return f"unknown envelope kind {kind}"
    if len(envelope) != len(expected) + 1:
        return f"envelope kind {kind}: {len(envelope) - 1} fields, not {len(expected)}"
    fields = zip(envelope[1:], expected, strict=True)
    wrong = [
        f"a {type(value).__name__} where a {expected.__name__} belongs"
        for value, expected in fields
        if expected is not object and type(value) is not expected
    ]
    return f"envelope kind {kind}: {', '.join(wrong)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRef:
    """Address of one incarnation of a named actor: a plain value, to be stored, compared and sent.
    Every call carries `incarnation`, so a message meant for an actor that has since been restarted
    is refused, never delivered to its successor."""

    name: str  # unique within the node
    incarnation: int  # how many times the actor has been started on this node, from 1
    node_id: str  # the host the actor lives on
    ipc_endpoint: str  # `ipc://...`, reachable on the same node
    tcp_endpoint: str = ""  # `tcp://...` under CURVE, or "" if the job has no tcp

    def endpoint_from(self, node_id: str) -> str:
        """The endpoint that a caller on `node_id` uses: ipc on the same node, else tcp."""
        return self.ipc_endpoint if node_id == self.node_id else self.tcp_endpoint

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}@{self.node_id}"


Frame: TypeAlias = bytes | memoryview


class Encoder:
    """Packs values; collects the frames of large arrays on the side. Not thread-safe."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._packer = msgpack.Packer(default=self._pack_other, use_bin_type=True)

    def encode(self, value: object) -> tuple[bytes, list[Frame]]:
        """The packed bytes, and the frames they refer to by position. Raises TypeError, ValueError
        or OverflowError if the value has no wire form."""
        try:
            header = self._packer.pack(value)
        except BaseException:
            self._frames = []
            self._packer.reset()
            raise
        if not self._frames:
            return header, self._frames
        frames, self._frames = self._frames, []
        return header, frames

    def _pack_other(self, value: object) -> msgpack.ExtType:
        if isinstance(value, ActorRef):
            fields = (
                value.name,
                value.incarnation,
                value.node_id,
                value.ipc_endpoint,
                value.tcp_endpoint,
            )
            return msgpack.ExtType(_EXT_REF, msgpack.packb(fields))
        if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
            return self._pack_array(value)
        if isinstance(value, memoryview):
            data = cast("memoryview[int]", value)
            return self._pack_array_bytes("|u1", (data.nbytes,), data)
        raise TypeError(
            f"cannot send a {type(value).__qualname__}: send plain data or numpy arrays"
        )

    def _pack_array(self, value: Any) -> msgpack.ExtType:
        import numpy as np

        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if array.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"cannot send an array of dtype {array.dtype}: only numbers travel")
        return self._pack_array_bytes(array.dtype.str, array.shape, array.reshape(-1).data)

    def _pack_array_bytes(
        self, dtype: str, shape: tuple[int, ...], data: memoryview
    ) -> msgpack.ExtType:
        if data.nbytes < FRAME_MIN_NBYTES:
            inline = msgpack.packb((dtype, shape, data.tobytes()))
            return msgpack.ExtType(_EXT_ARRAY, inline)
        self._frames.append(data.cast("B"))
        by_frame = msgpack.packb((dtype, shape, len(self._frames) - 1))
        return msgpack.ExtType(_EXT_FRAME_ARRAY, by_frame)


class Decoder:
    """Unpacks headers. Headers share no state. Not thread-safe."""

    def __init__(self) -> None:
        self._frames: Sequence[Frame] = ()

    def decode(self, header: Frame, frames: Sequence[Frame] = ()) -> Iterator[Any]:
        """Yields the header's values in order. Raises ProtocolError if the bytes are truncated,
        too large, too deep or not msgpack; values yielded before are valid. `BadEnvelope` if
        the call is known."""
        self._frames = frames
        position = 0
        try:
            # A new one each time: bytes of a truncated header that stay in an unpacker would become
            # the beginning of the next message, which may be another peer's.
            unpacker = self._unpacker(header)
            while position < len(header):
                value = unpacker.unpack()
                position = unpacker.tell()
                yield value
        except Exception as error:
            message = f"undecodable message: {_reason(error)}"
            call = _first_two_integers(header, position)
            if call is None:
                raise ProtocolError(message) from error
            raise BadEnvelope(message, *call) from error
        finally:
            self._frames = ()

    def _unpacker(self, header: Frame) -> msgpack.Unpacker:
        unpacker = msgpack.Unpacker(
            ext_hook=self._unpack_ext,
            raw=False,
            strict_map_key=True,
            max_buffer_size=HEADER_MAX_NBYTES,
            max_str_len=ITEM_MAX_LEN,
            max_bin_len=ITEM_MAX_LEN,
            max_ext_len=ITEM_MAX_LEN,
            max_array_len=ITEM_MAX_LEN // 8,
            max_map_len=ITEM_MAX_LEN // 8,
        )
        unpacker.feed(header)
        return unpacker

    def _unpack_ext(self, code: int, data: bytes) -> object:
        match code:
            case 1:
                name, incarnation, node_id, ipc, tcp = msgpack.unpackb(data)
                texts = (name, node_id, ipc, tcp)
                if type(incarnation) is not int or not all(type(text) is str for text in texts):
                    raise ProtocolError("malformed actor reference")
                return ActorRef(
                    name=name,
                    incarnation=incarnation,
                    node_id=node_id,
                    ipc_endpoint=ipc,
                    tcp_endpoint=tcp,
                )
            case 2:
                dtype, shape, inline = msgpack.unpackb(data)
                return _as_array(dtype, shape, inline)
            case 3:
                dtype, shape, idx = msgpack.unpackb(data)
                if type(idx) is not int or not 0 <= idx < len(self._frames):
                    raise ProtocolError(f"array refers to frame {idx!r} of {len(self._frames)}")
                return _as_array(dtype, shape, self._frames[idx])
            case _:
                raise ProtocolError(f"unknown extension type {code}")


def _reason(error: Exception) -> str:
    if isinstance(error, msgpack.OutOfData):
        return "truncated"
    # Not `repr`, which would include all bytes of text that is not UTF-8.
    return f"{type(error).__name__}: {error}"[:_REASON_MAX_LEN]


def _first_two_integers(header: Frame, position: int) -> tuple[int, int] | None:
    unpacker = msgpack.Unpacker()
    unpacker.feed(header[position : position + 32])
    try:
        unpacker.read_array_header()
        kind, call_id = unpacker.unpack(), unpacker.unpack()
    except Exception:  # noqa: BLE001 -- the bytes are known to be malformed; details do not matter
        return None
    if type(kind) is int and type(call_id) is int:
        return kind, call_id
    return None


def _as_array(dtype: object, shape: list[int], data: Frame) -> NDArray[np.generic]:
    import numpy as np

    if not isinstance(dtype, str) or not _ARRAY_DTYPE.fullmatch(dtype):
        raise ProtocolError(f"array of dtype {brief(dtype)} refused: only numbers travel")
    array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
    array.flags.writeable = False
    return array
