"""vLLM names its shared memory, semaphores and sockets, and removes the names only when it
ends in order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.cluster.socket_dir import MAX_SOCKET_PATH_NBYTES
from umbra.runtime.process import descendants

_SOCKET_NAME_NUM_CHARS: Final = 40  # vLLM's own are UUIDs
_SHARED_FOLDER: Final = "/dev/shm"
_SHARED_NAMES: Final = ("psm_", "sem.mp-", "vllm_dist_", "vllm_offload_", "vllm_ec_")
# Names made by multiprocessing, by several workers on the CPU, and by caches in host memory
# (kv_offloading_size).


def job_folder() -> str:
    """The job's socket directory, removed with the job; "" outside an actor's process."""
    try:
        endpoint = actor_context().supervisor.ref.ipc_endpoint
    except RuntimeError:
        return ""
    return str(Path(endpoint.removeprefix("ipc://")).parent)


def file_variables(folder: str, *, is_cpu: bool) -> dict[str, str]:
    """Variables that make vLLM put its files into the folder, unless its path is too
    long for sockets."""
    if not folder or len(folder) + 1 + _SOCKET_NAME_NUM_CHARS > MAX_SOCKET_PATH_NBYTES:
        return {}
    variables = {"VLLM_RPC_BASE_PATH": folder}
    # Not on a GPU, where compilers keep caches in that folder for later runs.
    return variables | ({"TMPDIR": folder} if is_cpu else {})


def unlink_shared_memory() -> None:
    """Removes the names of shared memory that this process and its descendants have mapped. Must be
    called while they all run, when none of them opens anything by name any more. The kernel frees
    the memory with the last of them."""
    pids = [os.getpid(), *(pid for pid, _ in descendants.living_descendants(os.getpid()))]
    ours = {inode for pid in pids for inode in _mapped_inodes(pid)}
    for entry in os.scandir(_SHARED_FOLDER):
        if entry.name.startswith(_SHARED_NAMES) and entry.inode() in ours:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)


def _mapped_inodes(pid: int) -> Iterator[int]:
    """Inodes of mapped shared memory: the maker of a semaphore maps it under another name."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{_SHARED_FOLDER}/"):
                    yield int(fields[4])
    except OSError:
        return  # it has ended
