"""Events of samples, and their encoding in the ledger's files.

Letters: G samples of a group, S runs of tokens or samples, N tokens of all runs.

Samples are numbered by `uid`, counted up from 0 within one log. An event is encoded as the msgpack
list `[tag, *fields]`, with arrays as raw little-endian bytes. Events that are appended together are
a batch `[time_s, *events]`, or several in order where one would be too large. Encoding and decoding
raise LedgerError for events that the format cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import LedgerError

Uids: TypeAlias = NDArray[np.int64]

GIVEN: Final = -1  # in place of a version: the tokens were given, not generated
BATCH_MAX_NBYTES: Final = 8 * 1024 * 1024
"""Size limit of a batch. Encoding much larger events would block the loop for more than 10 ms; a
lower limit would refuse long prompts of agent loops."""
_EVENT_MAX_TOKENS: Final = 128 * 1024
"""Tokens in one event of runs, 5 MiB if each run has one. More could pass `BATCH_MAX_NBYTES`; fewer
make more events of a manager that was held up."""


def uids_of(*uids: int) -> Uids:
    return np.asarray(uids, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """`version` is the weights after `step` steps. Durable before anything is generated with it."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A group of G samples: uid `first_uid + k` is `{group_id}/{k}`. `order_idx` is its index in
    the endless order of prompts; `seeds` [G] are the samples'."""

    first_uid: int
    group_id: str
    prompt_id: str
    epoch: int
    order_idx: int
    seeds: NDArray[np.int64]

    def __post_init__(self) -> None:
        _require(len(self.seeds) > 0, f"the group {self.group_id} has no samples")


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    uids: Uids


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The samples' generation was interrupted; their tokens stay."""

    uids: Uids
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Runs of completion tokens, each made under one version (GIVEN: not generated)."""

    uids: Uids  # [S] the sample of each run
    starts: NDArray[np.int64]  # [S] index of each run's first token in the completion
    offsets: NDArray[np.int64]  # [S + 1] of the runs in tokens and logprobs
    versions: NDArray[np.int64]  # [S] of each run
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        num_runs, num_tokens, offsets = len(self.uids), len(self.tokens), self.offsets
        _require(
            len(self.starts) == len(self.versions) == num_runs == len(offsets) - 1
            and len(self.logprobs) == num_tokens,
            "the columns of runs of tokens differ in length",
        )
        _require(
            offsets[0] == 0 and offsets[-1] == num_tokens and bool((self.lengths > 0).all()),
            f"the offsets do not cut {num_tokens} tokens into {num_runs} runs",
        )
        _require(
            num_runs == 0 or bool(self.starts.min() >= 0 and self.versions.min() >= GIVEN),
            "a run of tokens has a negative start or version",
        )
        _require(bool(np.isfinite(self.logprobs).all()), "some logprobs are not finite")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[S] of the runs."""
        return self.offsets[1:] - self.offsets[:-1]

    def parts(self) -> Iterator[Tokens]:
        """The same runs as events that the ledger takes, in order; cuts runs where it must."""
        num_tokens = len(self.tokens)
        if num_tokens <= _EVENT_MAX_TOKENS:
            yield self
            return
        for first in range(0, num_tokens, _EVENT_MAX_TOKENS):
            last = min(first + _EVENT_MAX_TOKENS, num_tokens)
            begin = np.searchsorted(self.offsets, first, "right") - 1
            end = np.searchsorted(self.offsets, last, "left")
            offsets = np.clip(self.offsets[begin : end + 1], first, last)
            yield Tokens(
                self.uids[begin:end],
                self.starts[begin:end] + offsets[:-1] - self.offsets[begin:end],
                offsets - first,
                self.versions[begin:end],
                self.tokens[first:last],
                self.logprobs[first:last],
            )


@dataclass(frozen=True, slots=True, eq=False)
class PromptGiven:
    """An agent loop replaced the prompt, before the first token of the completion."""

    uid: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Reset:
    """An agent loop starts over: prompt and completion of the sample are discarded."""

    uid: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A value of `ctx.once(key)`: plain data (tuples come back as lists)."""

    uid: int
    key: str
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """The samples are complete, each with its reason."""

    uids: Uids
    reasons: Sequence[str]

    def __post_init__(self) -> None:
        _require(len(self.uids) == len(self.reasons), "expected one reason per uid")


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Rewards of the samples, [S]."""

    uids: Uids
    rewards: NDArray[np.float64]

    def __post_init__(self) -> None:
        _require(len(self.uids) == len(self.rewards), "expected one reward per uid")
        _require(bool(np.isfinite(self.rewards).all()), "some rewards are not finite")


@dataclass(frozen=True, slots=True, eq=False)
class RewardParts:
    """The parts of the rewards that the samples are about to get, K for each: `values`, [S * K], in
    the order of `names`, sample after sample; NaN where a part does not apply."""

    uids: Uids
    names: Sequence[str]
    values: NDArray[np.float64]

    def __post_init__(self) -> None:
        expected = len(self.uids) * len(self.names)
        _require(len(self.values) == expected, "expected one value per uid and name")


@dataclass(frozen=True, slots=True, eq=False)
class TeacherLogprobs:
    """The teacher's logprobs [C] of a finished sample's whole completion."""

    uid: int
    logprobs: NDArray[np.float32]

    def __post_init__(self) -> None:
        _require(bool(np.isfinite(self.logprobs).all()), "some teacher logprobs are not finite")


@dataclass(frozen=True, slots=True, eq=False)
class Leased:
    """The samples, whole groups, were delivered to the ranks for optimizer step `step`, from 0.
    Must be durable before the ranks have them. Otherwise a checkpoint may have been trained on
    samples that the ledger has as scored."""

    step: int
    uids: Uids


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """The samples will never be trained on. `reason` is one of a few; `cause` has details."""

    uids: Uids
    reason: str
    cause: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A complete checkpoint after `step` optimizer steps exists; `version` was the newest then."""

    step: int
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """The job resumes from the checkpoint after `step` steps (0: from the start).

    `version` was the newest when the checkpoint was made. Samples leased for that step or later are
    scored again. Other samples that are not trained lose all tokens from the first one of a later
    step's version on.
    """

    step: int
    version: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out prompts were generated and scored after `step` steps. Must be durable before the
    ranks have `outcome`, which is plain data: a rank that it did not reach asks for it again."""

    step: int
    temperature: float
    outcome: Mapping[str, Any]


Event: TypeAlias = (
    Version
    | Admitted
    | Started
    | Cut
    | Tokens
    | PromptGiven
    | Reset
    | Recorded
    | Finished
    | Scored
    | RewardParts
    | TeacherLogprobs
    | Leased
    | Dropped
    | Checkpoint
    | Restored
    | Evaluated
)


@dataclass(frozen=True, slots=True)
class Batch:
    time_s: float
    events: tuple[Event, ...]


def encode_event(event: Event) -> bytes:
    try:
        data: bytes = msgpack.packb(_to_wire(event))
    except (TypeError, ValueError, OverflowError) as error:
        about = f" (the value of {event.key})" if isinstance(event, Recorded) else ""
        raise LedgerError(
            f"an event cannot be encoded{about}: {error}; ctx.once keeps plain data: numbers, "
            "text, bytes, lists and dictionaries"
        ) from error
    if len(data) > BATCH_MAX_NBYTES:
        what, remedy = _too_large(event)
        raise LedgerError(
            f"{what} has {len(data)} bytes in the ledger, at most {BATCH_MAX_NBYTES} are allowed"
            f"{remedy}"
        )
    return data


def _too_large(event: Event) -> tuple[str, str]:
    match event:
        case PromptGiven():
            what = f"a prompt of {len(event.tokens)} tokens"
            return what, ": give generate() fewer, or lower pool.max_context_len"
        case Recorded():
            what = f"the value of {event.key}"
            return what, ": keep a large value in a file, and the file's path with ctx.once"
        case _:
            return f"an event of kind {type(event).__name__}", ""


def encode_batches(time_s: float, events: Iterable[Event]) -> list[bytes]:
    batches: list[list[bytes]] = [[]]
    nbytes = 0
    for data in map(encode_event, events):
        nbytes += len(data)
        if batches[-1] and nbytes > BATCH_MAX_NBYTES:
            batches.append([])
            nbytes = len(data)
        batches[-1].append(data)
    packer = msgpack.Packer()
    time = packer.pack(time_s)
    return [b"".join([packer.pack_array_header(1 + len(batch)), time, *batch]) for batch in batches]


def decode_batches(payload: bytes | memoryview) -> Iterator[Batch]:
    """The batches of a frame's payload; arrays are read-only."""
    unpacker: Any = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=2**31 - 1)
    unpacker.feed(payload)
    try:
        while unpacker.tell() < len(payload):
            time_s, *events = unpacker.unpack()
            yield Batch(float(time_s), tuple(_from_wire(event) for event in events))
    except msgpack.OutOfData as error:
        raise LedgerError("events cannot be decoded: the last batch is incomplete") from error
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
        raise LedgerError(f"events cannot be decoded: {error}") from error


class _Ints:
    def __init__(self, dtype: str) -> None:
        self._dtype = np.dtype(dtype)

    def to_wire(self, value: Any) -> Any:
        array = np.ascontiguousarray(value, self._dtype)
        if array.ndim != 1:
            raise ValueError(f"a column has {array.ndim} dimensions, not 1")
        return array.data

    def from_wire(self, value: Any) -> Any:
        if not isinstance(value, bytes):
            raise TypeError(f"a column is encoded as {type(value).__name__}, not bytes")
        return np.frombuffer(value, self._dtype)


class _Plain:
    """A value of one type that msgpack can encode; integers must not be negative."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def to_wire(self, value: Any) -> Any:
        # Converted here, because msgpack's error for numpy integers would not help.
        return self.from_wire(value.item() if isinstance(value, np.generic) else value)

    def from_wire(self, value: Any) -> Any:
        if type(value) is not self._kind:
            raise TypeError(f"expected {self._kind.__name__}, got {type(value).__name__} {value!r}")
        if self._kind is int and cast(int, value) < 0:
            raise ValueError(f"expected a number of 0 or more, got {value}")
        return value


class _Texts:
    def to_wire(self, value: Any) -> Any:
        return self.from_wire(list(value))

    def from_wire(self, value: Any) -> Any:
        if not isinstance(value, list) or not all(
            isinstance(text, str) for text in cast(list[Any], value)
        ):
            raise TypeError("a column of texts holds something else")
        return cast(list[str], value)


class _Anything:
    def to_wire(self, value: Any) -> Any:
        return value

    from_wire = to_wire


_INT: Final = _Plain(int)
_STR: Final = _Plain(str)
_FLOAT: Final = _Plain(float)
_I64: Final = _Ints("<i8")
_I32: Final = _Ints("<i4")
_F32: Final = _Ints("<f4")
_F64: Final = _Ints("<f8")

# Tags are part of the file format: never change or reuse one.
_KINDS: Final[dict[int, tuple[type[Any], tuple[Any, ...]]]] = {
    1: (Version, (_INT, _INT)),
    2: (Admitted, (_INT, _STR, _STR, _INT, _INT, _I64)),
    3: (Started, (_I64,)),
    4: (Cut, (_I64, _STR)),
    5: (Tokens, (_I64, _I64, _I64, _I64, _I32, _F32)),
    6: (PromptGiven, (_INT, _I32)),
    7: (Reset, (_INT, _STR)),
    8: (Recorded, (_INT, _STR, _Anything())),
    9: (Finished, (_I64, _Texts())),
    10: (Scored, (_I64, _F64)),
    11: (Leased, (_INT, _I64)),
    12: (Dropped, (_I64, _STR, _STR)),
    13: (Checkpoint, (_INT, _INT)),
    14: (Restored, (_INT, _INT)),  # earlier umbras wrote a third field, always false
    15: (Evaluated, (_INT, _FLOAT, _Anything())),
    16: (RewardParts, (_I64, _Texts(), _F64)),
    17: (TeacherLogprobs, (_INT, _F32)),
}
_FORMS: Final = {
    kind: (tag, tuple((field.name, form) for field, form in zip(fields(kind), forms, strict=True)))
    for tag, (kind, forms) in _KINDS.items()
}


def _to_wire(event: Event) -> list[Any]:
    tag, forms = _FORMS[type(event)]
    return [tag, *[form.to_wire(getattr(event, name)) for name, form in forms]]


def _from_wire(item: Any) -> Event:
    tag, *values = item
    if tag not in _KINDS:
        raise ValueError(f"event tag {tag!r} is unknown: was this written by a newer umbra?")
    kind, forms = _KINDS[tag]
    if len(values) < len(forms):
        raise ValueError(f"{kind.__name__} has {len(values)} fields, expected {len(forms)}")
    event: Event = kind(
        *[form.from_wire(value) for form, value in zip(forms, values, strict=False)]
    )
    return event


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
