"""A checkpoint whose bytes changed is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from umbra.runtime.errors import ConfigError
from umbra.trainer.checkpoint.file_digests import DigestingFileSystem, complete, find_damage

NAMES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "trainer.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of two shards, which are digested while they are written, and two other files."""
    files = DigestingFileSystem()
    for name in NAMES[:2]:
        with files.create_stream(tmp_path / name, "wb") as stream:
            writer: Any = stream
            for part in (b"some ", b"", memoryview(b"bytes of "), name.encode() * 100_000):
                writer.write(part)
    for name in NAMES[2:]:
        (tmp_path / name).write_bytes(name.encode())
    complete(tmp_path, files.digests)
    assert set(files.digests) == set(NAMES[:2])
    return tmp_path


def test_what_is_as_it_was_written_is_intact(checkpoint: Path) -> None:
    assert find_damage(checkpoint) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_noticed_by_the_one_that_reads_the_file(
    checkpoint: Path, name: str
) -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[len(data) // 2] ^= 4
    (checkpoint / name).write_bytes(data)

    found = [find_damage(checkpoint, part, 3) for part in range(3)]

    assert find_damage(checkpoint).startswith(f"{name} changed since it was written: its digest is")
    assert [text.partition(" ")[0] for text in found if text] == [name]


def test_a_file_that_is_missing_is_named(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()

    assert find_damage(checkpoint) == ".metadata cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("content", "number"), [("", 0), ('{"format": 2, "digests": {}}', 2), ('{"format": 99}', 99)]
)
def test_another_format_is_no_damage(checkpoint: Path, content: str, number: int) -> None:
    (checkpoint / "COMPLETE").write_text(content)

    with pytest.raises(
        ConfigError,
        match=rf"{checkpoint} has format {number}, and this version of umbra reads format 1: use",
    ):
        find_damage(checkpoint)


@pytest.mark.parametrize("content", ["{}", "[]", '{"digests": [1]}', "{"])
def test_digests_that_cannot_be_read_are_damage(checkpoint: Path, content: str) -> None:
    (checkpoint / "COMPLETE").write_text(content)

    assert find_damage(checkpoint).startswith("COMPLETE does not have the digests of its files")
