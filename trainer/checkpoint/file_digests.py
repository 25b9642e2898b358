"""Digests of a checkpoint's files, so that changed bytes are noticed before anything is loaded. A
rank digests its own shards while it writes them; COMPLETE, the last file, has all digests."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from umbra.runtime.errors import ConfigError
from umbra.trainer.checkpoint.run_dir import NEW_RUN
from umbra.trainer.checkpoint.trainer_state import COMPLETE
from umbra.trainer.world.run_files import write_json

_DIGESTS: Final = "digests"
_FORMAT: Final = "format"
FORMAT: Final = 1
"""The format of a checkpoint's files. COMPLETE was empty in format 0."""


class DigestingFileSystem(FileSystem):
    """Digests the contents of each file while they are written; `digests` are by name."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        assert mode == "wb", "only a writer has it"
        with _DigestingWriter(io.FileIO(path, "wb")) as stream:
            yield stream
        self.digests[Path(path).name] = stream.digest.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        Path(path).rename(new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _DigestingWriter(io.BufferedWriter):
    """May only be written to from the beginning to the end."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.digest = xxhash.xxh3_128()

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        return super().write(data)


def complete(checkpoint: Path, digests: Mapping[str, str]) -> None:
    """Writes COMPLETE, durably. `digests` are of the files that ranks have written; the others,
    which are small, are read again."""
    others = {path.name for path in checkpoint.iterdir()} - digests.keys()
    found = {**digests, **{name: _digest(checkpoint / name) for name in others}}
    write_json(checkpoint / COMPLETE, {_FORMAT: FORMAT, _DIGESTS: dict(sorted(found.items()))})


def check_format(checkpoint: Path) -> None:
    """Raises ConfigError if another version of umbra wrote the checkpoint in another format."""
    try:
        found = _record(checkpoint).get(_FORMAT, FORMAT)
    except (OSError, ValueError, AttributeError):
        return  # damage, which an older checkpoint may heal
    if found != FORMAT:
        raise ConfigError(
            f"the checkpoint {checkpoint} has format {found}, and this version of umbra reads "
            f"format {FORMAT}: use the version that wrote it, to resume it or to export its "
            f"model for a new run, or {NEW_RUN}"
        )


def _record(checkpoint: Path) -> dict[str, Any]:
    text = (checkpoint / COMPLETE).read_text(encoding="utf-8")
    return json.loads(text) if text else {_FORMAT: 0}


def find_damage(checkpoint: Path, part: int = 0, num_parts: int = 1) -> str:
    """The first file that is not as it was written, and how; "" if all are. Reads one of
    `num_parts` equal parts of the files. Raises ConfigError for another format."""
    check_format(checkpoint)
    try:
        digests: dict[str, str] = dict(_record(checkpoint)[_DIGESTS])
        names = sorted(digests)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{COMPLETE} does not have the digests of its files ({type(error).__name__})"
    for name in names[part::num_parts]:
        try:
            digest = _digest(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if digest != digests[name]:
            return (
                f"{name} changed since it was written: its digest is {digest}, not {digests[name]}"
            )
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        found: Any = hashlib.file_digest(file, cast("Any", xxhash.xxh3_128))
    return found.hexdigest()
