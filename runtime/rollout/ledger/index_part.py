"""The files beside one part of a ledger's log, and the removal of parts.

    000001-0003.index   the samples that ended in this part
               .kept    once the part may go: digests of their tokens, and the contents of the best
                        and the worst of each step, in one frame

An index has three frames (`ledger_frames`): facts by which a reader knows whether it needs more,
the `SampleTable` at the part's end, and the rows of samples that were trained or dropped in it.
The log's bytes decide the content, whoever writes it. An index appears by a rename, and a reader
treats a damaged or foreign one as missing. It is never locked, and synced before its log goes.

A part is removed when the newer ones have the wanted size, no snapshot that is needed lies before
its end, and no sample began in it that may still change. Samples that end later than in the part in
which they began are written before the first of their parts is removed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from umbra.runtime.disk import explain, replacing, sync
from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger import ledger_frames
from umbra.runtime.rollout.ledger.ledger_history import LogPart, kept_path
from umbra.runtime.rollout.ledger.sample_accounts import (
    SampleRow,
    SampleState,
    rows_from_wire,
    rows_to_wire,
)
from umbra.runtime.rollout.ledger.sample_contents import SampleContent
from umbra.runtime.rollout.ledger.sample_table import EvaluationRow, SampleTable

_FORMAT: Final = 2
_LEVEL: Final = 3  # of zlib; higher ones take several times as long for a tenth


class BadIndexError(Exception):
    """The file of an index is missing, damaged, or of another log."""


class Life(NamedTuple):
    life: int
    job_id: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    format: int = _FORMAT
    begin: int  # size of all earlier parts
    nbytes: int  # how much of the part was read
    life: Life | None  # tells the log from an earlier one of its name
    uids: list[int]  # lowest and highest of the ended rows
    steps: list[int]  # the same, empty without any
    rewards: list[float]  # the same
    first: int  # byte at which the first of these rows begins
    num_dropped: int  # of these rows
    groups: bytes  # hashes of their groups' ids, 4 bytes each
    restores: list[int]  # as in `SampleTable`
    evaluations: list[EvaluationRow]

    def may_have_group(self, group_id: str) -> bool:
        name = _hash(group_id)
        return any(self.groups[i : i + 4] == name for i in range(0, len(self.groups), 4))


@dataclass(slots=True)
class IndexPart:
    """The index of the part `log`; its bytes are held if they are not in the file."""

    log: LogPart
    facts: PartFacts
    _held: bytes = field(default=b"", repr=False)

    @classmethod
    def read(cls, log: LogPart, begin: int) -> IndexPart:
        """Raises BadIndexError unless the file fits a part that begins after `begin` bytes."""
        try:
            payload = ledger_frames.read_first(_path_of(log))
            if payload is None:
                raise BadIndexError
            fields: dict[str, Any] = msgpack.unpackb(payload)
            if fields.get("format") != _FORMAT:
                raise BadIndexError
            fields["evaluations"] = [EvaluationRow(*found) for found in fields["evaluations"]]
            fields["life"] = fields["life"] and Life(*fields["life"])
            facts = PartFacts(**fields)
        except (OSError, KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise BadIndexError from error
        if facts.begin != begin or facts.nbytes > log.stop:
            raise BadIndexError
        return cls(log, facts)

    @classmethod
    def write(
        cls,
        log: LogPart,
        begin: int,
        nbytes: int,
        life: Life | None,
        table: SampleTable,
    ) -> IndexPart:
        """Writes a table at byte `nbytes` of a part. A read-only folder gets no file."""
        wire = table.to_wire()  # counts the remaining runs
        rows = list(table.ended.values())
        rewards = [row.reward for row in rows if row.reward is not None]
        facts = PartFacts(
            begin=begin,
            nbytes=nbytes,
            life=life,
            uids=_range(row.uid for row in rows),
            steps=_range(row.step for row in rows if row.step is not None),
            rewards=_range(rewards),
            first=min((row.begin for row in rows), default=begin),
            num_dropped=sum(row.state is SampleState.DROPPED for row in rows),
            groups=b"".join({_hash(row.group.group_id) for row in rows}),
            restores=list(table.restores),
            evaluations=list(table.evaluations),
        )
        payloads = [
            msgpack.packb({name: getattr(facts, name) for name in PartFacts.__slots__}),
            zlib.compress(msgpack.packb(wire), _LEVEL),
            zlib.compress(msgpack.packb(rows_to_wire(rows)), _LEVEL),
        ]
        data = b""
        for payload in payloads:
            data += ledger_frames.head_of([payload], len(data)) + payload
        path = _path_of(log)
        draft = path.with_suffix(".draft")  # any other writer writes the same bytes
        try:
            draft.write_bytes(data)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink()  # a full disk has a part of it
            return cls(log, facts, data)
        return cls(log, facts)

    @property
    def is_on_disk(self) -> bool:
        return not self._held

    def rows(self) -> list[SampleRow]:
        """The samples that ended in this part. Raises BadIndexError."""
        return rows_from_wire(self._frame(2))

    def table(self) -> SampleTable:
        """The table at the end of the bytes read. Raises BadIndexError."""
        table = SampleTable()
        table.read_wire(self._frame(1), self._frame(2))
        return table

    def _frame(self, number: int) -> list[Any]:
        path = _path_of(self.log)
        try:
            frames = ledger_frames.scan(self._held or path.read_bytes(), path).frames
            found = msgpack.unpackb(frames[0][1])
            if (found["begin"], found["nbytes"]) != (self.facts.begin, self.facts.nbytes):
                raise BadIndexError  # it was replaced since
            wire = msgpack.unpackb(zlib.decompress(frames[number][1]), strict_map_key=False)
        except (OSError, LedgerError, IndexError, zlib.error) as error:
            raise BadIndexError from error
        return cast("list[Any]", wire)


def _path_of(log: LogPart) -> Path:
    return log.path.with_suffix(".index")


def _hash(group_id: str) -> bytes:
    return xxhash.xxh3_64(group_id.encode()).digest()[:4]


def _range(values: Iterable[Any]) -> list[Any]:
    held = list(values)
    return [min(held), max(held)] if held else []


_KEPT_LEVEL: Final = 4  # of zlib


class KeptSamples(NamedTuple):
    """The remains of the samples that ended in one part, by uid."""

    digests: dict[int, bytes]  # XXH3-64 of the completion's tokens as int32
    contents: dict[int, SampleContent]  # of the best and the worst sample of each step


def digest_of(tokens: NDArray[np.int32]) -> bytes:
    return xxhash.xxh3_64(tokens.tobytes()).digest()


def write_kept(log: Path, kept: KeptSamples) -> None:
    """Raises LedgerError if the file cannot be written."""
    wire = [
        kept.digests,
        {
            uid: [
                content.tokens.tobytes(),
                None if content.prompt is None else content.prompt.tobytes(),
                content.recorded,
            ]
            for uid, content in kept.contents.items()
        },
    ]
    payload = zlib.compress(msgpack.packb(wire), _KEPT_LEVEL)
    path = kept_path(log)
    try:
        with replacing(path) as file:
            file.write(ledger_frames.head_of([payload], 0) + payload)
    except OSError as error:
        raise LedgerError(f"cannot write {path}: {explain(error, path)}") from error


def read_kept(log: Path) -> KeptSamples:
    """Raises LedgerError if the file is missing or damaged."""
    path = kept_path(log)
    try:
        payload = ledger_frames.read_first(path)
        if payload is None:
            raise LedgerError(f"{path} is damaged: restore it from a backup")
        wire: Any = msgpack.unpackb(zlib.decompress(payload), strict_map_key=False)
    except OSError as error:
        raise LedgerError(f"cannot read {path}: {error.strerror}") from error
    contents: dict[int, SampleContent] = {}
    for uid, (tokens, prompt, recorded) in wire[1].items():
        content = contents[uid] = SampleContent()
        content.tokens = np.frombuffer(tokens, "<i4")
        content.prompt = None if prompt is None else np.frombuffer(prompt, "<i4")
        content.recorded = recorded
    return KeptSamples(wire[0], contents)


def remove_logs(logs: Iterable[Path]) -> None:
    """Removes the oldest logs, whose remains are written."""
    present = [log for log in logs if log.exists()]
    for log in present:
        sync(log.with_suffix(".index"))
    for folder in {log.parent for log in present}:
        sync(folder)  # the names of the remains come to the disk before a log leaves it
    for log in present:
        log.unlink()
