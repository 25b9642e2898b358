"""Kills a process at every point of replacing a folder, and looks what a reader sees then.

`python killed_replacements.py FOLDER [without-exchange]` prints, for each point in turn, which
version was there after the kill and which after the next start: "old", "new" or null.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

from umbra.trainer.world.run_files import replacing_folder, restore_folder

FILES = ("config.json", "model.safetensors", "tokenizer.json")


class LibcOfAnOldFileSystem:
    """Refuses to exchange two names, as on NFS."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def renameat2(self, *_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1


def replace(target: Path, version: str) -> None:
    with replacing_folder(target) as folder:
        for name in FILES:
            (folder / name).write_text(version)


def version_of(target: Path) -> str | None:
    """The version that a reader finds; fails if it is mixed or incomplete."""
    if not target.exists():
        return None
    (found,) = {(target / name).read_text() for name in FILES}
    assert {path.name for path in target.iterdir()} == set(FILES)
    return found


def replace_until_killed(target: Path, point: int) -> bool:
    """In a process of its own, with SIGKILL at its so-manieth audited call; whether it came."""
    pid = os.fork()
    if pid == 0:
        num_calls = 0

        def count(event: str, _: object) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == point:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        replace(target, "new")
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def main(folder: Path) -> None:
    seen: list[tuple[str | None, str | None]] = []
    target = folder / "export"
    is_killed = True
    while is_killed:
        replace(target, "old")
        is_killed = replace_until_killed(target, len(seen) + 1)
        at_once = version_of(target)
        restore_folder(target)
        seen.append((at_once, version_of(target)))
        assert [path.name for path in folder.iterdir()] == ["export"], "the rest is gone"
    print(json.dumps(seen))


if __name__ == "__main__":
    libc = LibcOfAnOldFileSystem if sys.argv[2:] == ["without-exchange"] else ctypes.CDLL
    with patch.object(ctypes, "CDLL", libc):
        main(Path(sys.argv[1]))
