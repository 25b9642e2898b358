from __future__ import annotations

import os
from typing import BinaryIO


def open_memory_file(name: str, content: bytes) -> BinaryIO:
    """An open file in unnamed memory, for a child. Unlike a pipe it takes any length without
    blocking. `name` shows in /proc/PID/fd only. The memory is freed with the last process
    that has it open."""
    file = open(os.memfd_create(name), "w+b", buffering=0)  # noqa: SIM115 -- the caller's to close
    try:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file
