"""Files that vLLM's processes would leave behind where they are killed.

vLLM names its shared memory, semaphores and sockets, and removes them at an orderly end only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from umbra.runtime.actor import actor_context
from umbra.runtime.process import descendants
from umbra.runtime.socketdir import MAX_SOCKET_PATH_NBYTES

_SOCKET_NAME_NUM_CHARS: Final = 40  # vLLM's own are UUIDs
_SHARED: Final = ("/dev/shm/psm_", "/dev/shm/sem.mp-")  # names that multiprocessing makes


def file_variables(*, is_cpu: bool) -> dict[str, str]:
    """Variables that have vLLM put its files into the job's socket directory, which goes with it.

    None for an engine outside an actor's process, or where the directory's path is too long.
    """
    try:
        endpoint = actor_context().supervisor.ref.ipc_endpoint
    except RuntimeError:
        return {}
    folder = str(Path(endpoint.removeprefix("ipc://")).parent)
    if len(folder) + 1 + _SOCKET_NAME_NUM_CHARS > MAX_SOCKET_PATH_NBYTES:
        return {}
    variables = {"VLLM_RPC_BASE_PATH": folder}
    # On a GPU vLLM needs no such file, and compilers keep their caches there.
    return variables | ({"TMPDIR": folder} if is_cpu else {})


def unlink_shared_memory() -> None:
    """Takes the names from what this process and those below it have mapped.

    To be called once all of them run: nobody opens anything by its name then, and the kernel
    frees the memory with the last of them.
    """
    pids = [os.getpid(), *(pid for pid, _ in descendants.living_descendants(os.getpid()))]
    for path in {path for pid in pids for path in _mapped_files(pid)}:
        if path.startswith(_SHARED):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _mapped_files(pid: int) -> Iterator[str]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(maxsplit=5)
                if len(fields) == 6:
                    yield fields[5]
    except OSError:
        return  # it has ended
