"""What can happen to samples, and its form in the ledger's files.

Letters: G samples of a group, S runs of tokens or samples, N tokens of all runs.

Samples are known by `uid`, counted up from 0 within one log. The wire form of an event is the
msgpack list `[tag, *fields]`, arrays as raw little-endian bytes; events that belong together are
one batch `[time_s, *events]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeAlias, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import LedgerError

Uids: TypeAlias = NDArray[np.int64]

GIVEN: Final = -1  # the version of tokens that were given, not generated
BATCH_MAX_NBYTES: Final = 8 * 1024 * 1024
"""Of one batch. Encoding one much larger would hold up the loop for more than 10 ms; a smaller
bound would refuse honest ticks."""


def uids_of(*uids: int) -> Uids:
    """The column of these uids."""
    return np.asarray(uids, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """The weights `version` are those after `step` optimizer steps; its number is new.

    To be durable before anything is generated under it.
    """

    version: int
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A group of G samples: uid `first_uid + k` is `{group_id}/{k}`.

    Attributes:
        place: of the group in the endless order of the data.
        seeds: [G] of the samples.
    """

    first_uid: int
    group_id: str
    prompt_id: str
    epoch: int
    place: int
    seeds: NDArray[np.int64]

    def __post_init__(self) -> None:
        _require(len(self.seeds) > 0, f"the group {self.group_id} has no samples")


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """Given to engines."""

    uids: Uids


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Interrupted; what is there stays."""

    uids: Uids
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Runs of completion tokens, each made under one version (GIVEN: not generated).

    Attributes:
        uids, starts, versions: [S] the sample of each run, its first token's place in the
            completion, its version.
        offsets: [S + 1] of the runs in tokens and logprobs.
    """

    uids: Uids
    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    versions: NDArray[np.int64]
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
            offsets[0] == 0 and offsets[-1] == num_tokens and bool((np.diff(offsets) > 0).all()),
            f"the offsets do not cut {num_tokens} tokens into {num_runs} runs",
        )
        _require(
            num_runs == 0 or bool(self.starts.min() >= 0 and self.versions.min() >= GIVEN),
            "a run of tokens with a negative start or version",
        )
        _require(bool(np.isfinite(self.logprobs).all()), "logprobs that are not finite")


@dataclass(frozen=True, slots=True, eq=False)
class PromptGiven:
    """An agent loop replaced the prompt, before the first token of the completion."""

    uid: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Reset:
    """An agent loop starts over: its prompt and completion are gone."""

    uid: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What `ctx.once(key)` returned: plain data (tuples come back as lists)."""

    uid: int
    key: str
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """Complete, each with its reason."""

    uids: Uids
    reasons: Sequence[str]

    def __post_init__(self) -> None:
        _require(len(self.uids) == len(self.reasons), "not one reason for each uid")


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Rewards, [S]."""

    uids: Uids
    rewards: NDArray[np.float64]

    def __post_init__(self) -> None:
        _require(len(self.uids) == len(self.rewards), "not one reward for each uid")
        _require(bool(np.isfinite(self.rewards).all()), "rewards that are not finite")


@dataclass(frozen=True, slots=True, eq=False)
class Leased:
    """Delivered to the ranks for optimizer step `step`, counted from 0; whole groups.

    To be durable before the ranks have them: else a checkpoint may have been trained on samples
    that the ledger takes for scored.
    """

    step: int
    uids: Uids


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """Will never be trained.

    Attributes:
        reason: one of a few, which are counted.
        cause: what went wrong in this case, for people; may be empty.
    """

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
    """The job goes on from the checkpoint after `step` steps (0: from the start).

    `version` was the newest when the checkpoint was made.
    Samples leased for that step or later are scored again. Of the others that are not trained,
    tokens from the first on whose version belongs to a later step are cut off, unless `keep_newer`.
    """

    step: int
    version: int
    keep_newer: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The held-out prompts were generated and scored after `step` steps.

    To be durable before the ranks have it: one that it did not reach asks for it again.

    Attributes:
        outcome: plain data, as the ranks get it.
    """

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
    | Leased
    | Dropped
    | Checkpoint
    | Restored
    | Evaluated
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that belong together, and when they were written."""

    time_s: float
    events: tuple[Event, ...]


def encode_batch(time_s: float, events: Sequence[Event]) -> bytes:
    """The wire form of one batch.

    Raises:
        LedgerError: it is too large, or a recorded value is not plain data.
    """
    try:
        data: bytes = msgpack.packb([time_s, *map(_to_wire, events)])
    except (TypeError, ValueError, OverflowError) as error:
        keys = [event.key for event in events if isinstance(event, Recorded)]
        about = f" (values of {', '.join(keys)})" if keys else ""
        raise LedgerError(
            f"events that cannot be written{about}: {error}; ctx.once keeps plain data: numbers, "
            "text, bytes, lists and dictionaries"
        ) from error
    if len(data) > BATCH_MAX_NBYTES:
        raise LedgerError(
            f"{len(data)} bytes of events at once, at most {BATCH_MAX_NBYTES}: split long columns, "
            "keep large values in files"
        )
    return data


def decode_batches(payload: bytes | memoryview) -> Iterator[Batch]:
    """The batches of a frame's payload; arrays are read-only.

    Raises:
        LedgerError: the payload is not made of whole, consistent events.
    """
    unpacker: Any = msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=2**31 - 1)
    unpacker.feed(payload)
    try:
        while unpacker.tell() < len(payload):
            time_s, *events = unpacker.unpack()
            yield Batch(float(time_s), tuple(_from_wire(event) for event in events))
    except msgpack.OutOfData as error:
        raise LedgerError("events that cannot be read: the last batch is not whole") from error
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
        raise LedgerError(f"events that cannot be read: {error}") from error


class _Ints:
    """A column of integers or floats of one dtype."""

    def __init__(self, dtype: str) -> None:
        self._dtype = np.dtype(dtype)

    def to_wire(self, value: Any) -> Any:
        array = np.ascontiguousarray(value, self._dtype)
        if array.ndim != 1:
            raise ValueError(f"a column of {array.ndim} dimensions")
        return array.data

    def from_wire(self, value: Any) -> Any:
        if not isinstance(value, bytes):
            raise TypeError(f"a column of type {type(value).__name__}")
        return np.frombuffer(value, self._dtype)


class _Plain:
    """A value that msgpack knows, of one type, and not negative."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def to_wire(self, value: Any) -> Any:
        # numpy's integers would be refused by msgpack, in words that do not help
        return self.from_wire(value.item() if isinstance(value, np.generic) else value)

    def from_wire(self, value: Any) -> Any:
        if type(value) is not self._kind:
            raise TypeError(f"{type(value).__name__} {value!r}, not {self._kind.__name__}")
        if self._kind is int and cast(int, value) < 0:
            raise ValueError(f"the negative number {value}")
        return value


class _Texts:
    """A column of short texts."""

    def to_wire(self, value: Any) -> Any:
        return self.from_wire(list(value))

    def from_wire(self, value: Any) -> Any:
        if not isinstance(value, list) or not all(
            isinstance(text, str) for text in cast(list[Any], value)
        ):
            raise TypeError("a column of texts with something else in it")
        return cast(list[str], value)


class _Anything:
    """Any value that msgpack knows."""

    def to_wire(self, value: Any) -> Any:
        return value

    from_wire = to_wire


_INT: Final = _Plain(int)
_STR: Final = _Plain(str)
_BOOL: Final = _Plain(bool)
_FLOAT: Final = _Plain(float)
_I64: Final = _Ints("<i8")
_I32: Final = _Ints("<i4")
_F32: Final = _Ints("<f4")
_F64: Final = _Ints("<f8")

# Tags are part of the files: never change or reuse one.
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
    14: (Restored, (_INT, _INT, _BOOL)),
    15: (Evaluated, (_INT, _FLOAT, _Anything())),
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
        raise ValueError(f"an unknown kind of event, {tag!r}: was this written by a newer umbra?")
    kind, forms = _KINDS[tag]
    if len(values) != len(forms):
        raise ValueError(f"{kind.__name__} with {len(values)} fields, not {len(forms)}")
    event: Event = kind(*[form.from_wire(value) for form, value in zip(forms, values, strict=True)])
    return event


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)
