"""Damages recorded messages: their bytes, and the types and sizes of their values."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, Final, cast

import msgpack
from recorded_traffic import Message

from umbra.runtime.rpc.wire import CALL

_PLACEHOLDER: Final = b"<nested here>"
"""The packer nests 511 levels at most, so deeper values replace this text once it is packed."""

PICKLE: Final = pickle.dumps(ValueError("unpickled"))
"""Unpickling it looks up a class, which `fuzz_target` observes."""

_NUMS_CHANGES: Final = (1, 1, 1, 1, 2, 3)
"""After more changes hardly anything is left that is read to its end."""
_NUMS_REPEATED: Final = (*(1, 2, 3, 5) * 8, 70, 1000)
_HUGE_NBYTES: Final = 1 << 20
_HEADER_MAX_NBYTES: Final = 2 << 20
"""Several changes of one message would multiply it to gigabytes."""

_SCALARS: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.0, -0.5, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", "x", "\0", "float32", "policy-1", "é" * 300, b"", b"\xff", bytes(64), PICKLE),
    *([], {}, [[]], {"": None}, [0, 0, None]),
)
_LENGTHS: Final = (
    b"\xdd\xff\xff\xff\xff",  # list
    b"\xdd\x00\x3f\xff\xff",  # the longest list that is allowed
    b"\xdf\xff\xff\xff\xff",  # map
    b"\xdf\x00\x3f\xff\xff",
    b"\xdb\xff\xff\xff\xff",  # text
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x02",  # extension
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
    b"\x9f",
    b"\x8f",
    b"\xc1",  # never used
)
_DTYPES: Final = (
    *("<f4", "<i8", "|u1", "|O", "O8", "<c8", "|V3", "|S4", "<M8[s]", "", "float32", None, 3),
    *("f8,f8", "9" * 400 + "f8", "f8," * 200, ["f8"], {"names": ["a"], "formats": ["f8"]}),
)


class FrameMutator:
    """Draws messages, each one to three changes away from a recorded one.

    Args:
        recorded: at least one of them is a call.
    """

    def __init__(self, recorded: Sequence[Message], random: Random) -> None:
        self._random = random
        self._recorded = recorded
        # Only calls reach methods, and there are fewer of them than answers.
        self._calls = [m for m in recorded if m[0][:2] == bytes((0x98, CALL))]
        self._byte_changes = (
            self._flip, self._truncate, self._repeat, self._cut, self._insert,
            self._put_length, self._splice, self._join, self._change_frames,
        )  # fmt: skip
        self._value_changes = (
            self._swap, self._swap, self._swap_type, self._nest, self._multiply, self._remove,
            self._add, self._extend,
        )  # fmt: skip

    def draw(self) -> Message:
        random = self._random
        seeds = self._calls if random.random() < 0.7 else self._recorded
        frames = list(random.choice(seeds))
        is_of_values = random.random() < 0.7
        for _ in range(random.choice(_NUMS_CHANGES)):
            if is_of_values:
                frames[0] = self._change_values(frames[0])
            else:
                random.choice(self._byte_changes)(frames)
        return frames

    # -- bytes ---------------------------------------------------------------------------

    def _flip(self, frames: Message) -> None:
        header = bytearray(frames[0])
        for _ in range(self._random.randint(1, 4)):
            if header:
                header[self._random.randrange(len(header))] ^= 1 << self._random.randrange(8)
        frames[0] = bytes(header)

    def _truncate(self, frames: Message) -> None:
        frames[0] = frames[0][: self._random.randint(0, len(frames[0]))]

    def _repeat(self, frames: Message) -> None:
        start, stop = self._range(frames[0])
        frames[0] = frames[0][:stop] + frames[0][start:]

    def _cut(self, frames: Message) -> None:
        start, stop = self._range(frames[0])
        frames[0] = frames[0][:start] + frames[0][stop:]

    def _insert(self, frames: Message) -> None:
        at, _ = self._range(frames[0])
        frames[0] = frames[0][:at] + self._random.randbytes(4) + frames[0][at:]

    def _put_length(self, frames: Message) -> None:
        at, _ = self._range(frames[0])
        length = self._random.choice(_LENGTHS)
        num_repeats = self._random.choice((1, 1, 1, 2, 20))
        frames[0] = frames[0][:at] + length * num_repeats + frames[0][at + len(length) :]

    def _splice(self, frames: Message) -> None:
        other = self._random.choice(self._recorded)[0]
        frames[0] = frames[0][: self._range(frames[0])[0]] + other[self._range(other)[0] :]

    def _join(self, frames: Message) -> None:
        frames[0] += self._random.choice(self._recorded)[0]

    def _change_frames(self, frames: Message) -> None:
        match self._random.randrange(4):
            case 0:
                del frames[1:]
            case 1:
                frames.append(frames[-1][: self._range(frames[-1])[1]])
            case 2:
                frames[-1] = frames[-1][: self._range(frames[-1])[0]]
            case _:
                frames.append(self._random.randbytes(self._random.choice((0, 3, 64, 20_000))))

    def _range(self, data: bytes) -> tuple[int, int]:
        """Start and end of a part, most of them short."""
        start = self._random.randint(0, len(data))
        return start, min(len(data), start + int(self._random.expovariate(0.1)))

    # -- values --------------------------------------------------------------------------

    def _change_values(self, header: bytes) -> bytes:
        envelopes = unpack_plainly(header)
        if not envelopes:  # an earlier change left nothing that can be read
            return header
        holder: Any = self._random.choice(envelopes)
        if not _is_container(holder) or not holder:
            return header
        while inner := [value for value in _values(holder) if value and _is_container(value)]:
            if self._random.random() < 0.25:
                break
            holder = self._random.choice(inner)
        keys: list[Any] = [*holder] if isinstance(holder, dict) else [*range(len(holder))]
        key = self._random.choice(keys)
        self._random.choice(self._value_changes)(holder, key)
        try:
            packed = b"".join(map(msgpack.packb, envelopes))
        except (ValueError, OverflowError):  # nested more than once, or negated 2**64 - 1
            return header
        if len(packed) > _HEADER_MAX_NBYTES:
            return header
        if _PLACEHOLDER not in packed:
            return packed
        depth = self._random.choice((10, 100, 500, 900, 1020, 1100))
        opening = self._random.choice((b"\x91", b"\x81\xa1a"))
        nested = opening * depth + b"\xc0"
        return packed.replace(msgpack.packb(_PLACEHOLDER), nested, 1)

    def _swap(self, holder: Any, key: Any) -> None:
        if self._random.random() < 0.0005:
            huge = (bytes(_HUGE_NBYTES), "x" * _HUGE_NBYTES, [0] * (_HUGE_NBYTES // 8))
            holder[key] = self._random.choice(huge)
        else:
            holder[key] = self._random.choice(_SCALARS)

    def _swap_type(self, holder: Any, key: Any) -> None:
        value: Any = holder[key]
        others: Sequence[Any]
        if isinstance(value, bool):
            others = (int(value),)
        elif isinstance(value, int):
            others = (float(value), str(value), bool(value), -value, value + 1, [value])
        elif isinstance(value, float):
            others = (str(value), -value, [value], 0, 5)
        elif isinstance(value, str):
            others = (value.encode(), value * 40, value[:-1], [value])
        elif isinstance(value, list):
            items = cast("list[Any]", value)
            others = ({str(idx): item for idx, item in enumerate(items)}, items[::-1])
        elif isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value)
            others = ([*pairs], [*pairs.items()], {})
        else:
            others = ([value],)
        holder[key] = self._random.choice(others)

    def _nest(self, holder: Any, key: Any) -> None:
        holder[key] = _PLACEHOLDER

    def _multiply(self, holder: Any, key: Any) -> None:
        holder[key] = [holder[key]] * self._random.choice(_NUMS_REPEATED)

    def _remove(self, holder: Any, key: Any) -> None:
        del holder[key]

    def _add(self, holder: Any, key: Any) -> None:
        if isinstance(holder, list):
            cast("list[Any]", holder).insert(key, holder[key])
        else:
            holder[self._random.choice(("", "x", b"\xff", "self", 5))] = holder[key]

    def _extend(self, holder: Any, key: Any) -> None:
        """Puts an extension: an array, a reference to an actor or to a frame, or garbage."""
        random = self._random
        data = random.choice((b"", bytes(8), bytes(4096), PICKLE, 0, 1, -1))
        shape = random.choice(([1], [2], [], [-1], [0, 2**62], [1] * 65, 8, None))
        payload = random.choice(
            (
                msgpack.packb([random.choice(_DTYPES), shape, data]),
                msgpack.packb(["name", random.choice((1, "9" * 4000, 1.5, None)), "n", "ipc", ""]),
                PICKLE,
                random.randbytes(12),
            )
        )
        holder[key] = msgpack.ExtType(random.choice((0, 1, 2, 2, 3, 3, 4, 127)), payload)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict)


def _values(holder: Any) -> Iterable[Any]:
    return cast("dict[Any, Any]", holder).values() if isinstance(holder, dict) else holder


def unpack_plainly(header: bytes) -> list[Any]:
    """The values of a header as lists, maps, numbers and `ExtType`; [] if it is malformed."""
    unpacker = msgpack.Unpacker(strict_map_key=False)
    unpacker.feed(header)
    try:
        return list(unpacker)
    except Exception:  # noqa: BLE001 -- malformed msgpack fails in many ways
        return []
