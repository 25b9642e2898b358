"""Removes the oldest parts of a ledger's log, once the remains of their samples are written:

    000001-0003.index   facts of the samples that ended in this part
               .kept    digests of their tokens, and the contents of the best and the worst of each
                        step, in one frame

A part is removed when the newer ones have the wanted size, no snapshot that is needed lies before
its end, and no sample began in it that may still change. Samples that end later than in the part in
which they began are written before the first of their parts is removed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from umbra.runtime.disk import explain, replacing, sync
from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger import ledger_frames
from umbra.runtime.rollout.ledger.ledger_history import kept_path
from umbra.runtime.rollout.ledger.sample_accounts import SampleContent

_LEVEL: Final = 4  # of zlib


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
    payload = zlib.compress(msgpack.packb(wire), _LEVEL)
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
