"""The parts of SGLang that the adapter uses, imported late: SGLang is heavy and optional. Its
objects are `Any`, because SGLang is absent where types are checked.

The functions confine SGLang's side effects on the process that starts it: SGLang reconfigures
logging, makes socket files in the temporary folder, and has its children send SIGQUIT on failure,
which would kill this process. Here the signal only ends the engine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import logging
import os
import signal
import tempfile
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

from umbra.engines.shell.adapter_settings import load_library
from umbra.runtime.errors import how_to_install
from umbra.runtime.process import descendants

_EXIT_LIMIT_S: Final = 20.0
# Time for killed processes to end and free their GPU memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLibrary:
    """Classes of SGLang, under SGLang's names.

    Attributes:
        BeginWeightUpdateReqInput, EndWeightUpdateReqInput: None before 0.5.23, which requires them.
        has_stream_interval: whether a request sets how many tokens make a message.
    """

    version: str
    Engine: Any
    ServerArgs: Any
    MultiprocessingSerializer: Any
    GenerateReqInput: Any
    PauseGenerationReqInput: Any
    ContinueGenerationReqInput: Any
    ReleaseMemoryOccupationReqInput: Any
    ResumeMemoryOccupationReqInput: Any
    UpdateWeightsFromTensorReqInput: Any
    BeginWeightUpdateReqInput: Any
    EndWeightUpdateReqInput: Any
    has_stream_interval: bool

    @classmethod
    def load(cls) -> Self:
        return load_library(
            "SGLang",
            "sglang",
            cls._pick,
            missing=how_to_install("sglang"),
        )

    @classmethod
    def _pick(cls, version: str) -> Self:
        def module(name: str) -> Any:
            return importlib.import_module(f"sglang.srt.{name}")

        structs = module("managers.io_struct")
        return cls(
            version=version,
            Engine=module("entrypoints.engine").Engine,
            ServerArgs=module("server_args").ServerArgs,
            MultiprocessingSerializer=module("utils").MultiprocessingSerializer,
            GenerateReqInput=structs.GenerateReqInput,
            PauseGenerationReqInput=structs.PauseGenerationReqInput,
            ContinueGenerationReqInput=structs.ContinueGenerationReqInput,
            ReleaseMemoryOccupationReqInput=structs.ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput=structs.ResumeMemoryOccupationReqInput,
            UpdateWeightsFromTensorReqInput=structs.UpdateWeightsFromTensorReqInput,
            BeginWeightUpdateReqInput=getattr(structs, "BeginWeightUpdateReqInput", None),
            EndWeightUpdateReqInput=getattr(structs, "EndWeightUpdateReqInput", None),
            has_stream_interval=hasattr(
                module("sampling.sampling_params").SamplingParams, "stream_interval"
            ),
        )

    def option_names(self) -> list[str]:
        """ServerArgs is a dataclass in 0.5.17 and none in 0.5.23."""
        return list(inspect.signature(self.ServerArgs).parameters)


def ignore_sigquit(signum: int, frame: object) -> None:
    """SGLang's `custom_sigquit_handler` during the start: the exception reports a failed start."""


def end_on_sigquit(signum: int, frame: object) -> None:
    print("a process of SGLang has failed", flush=True)
    os._exit(1)


@contextlib.contextmanager
def keeping_logging() -> Generator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def temporary_files_in(folder: Path | None) -> Generator[None]:
    """Puts this process's temporary files into `folder`, not the children's:
    compiler caches stay."""
    before = tempfile.tempdir
    tempfile.tempdir = before if folder is None else str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def socket_files(port_args: Any) -> list[Path]:
    fields = cast("dict[str, object]", vars(port_args))
    names = [value for value in fields.values() if isinstance(value, str)]
    return [Path(name.removeprefix("ipc://")) for name in names if name.startswith("ipc://")]


def remove_load_snapshot(frontend: Any) -> None:
    """Removes the name in /dev/shm that SGLang's scheduler leaves."""
    path: str | None = getattr(getattr(frontend, "load_snapshot_reader", None), "path", None)
    if path is not None:
        Path(path).unlink(missing_ok=True)


def end_children(pids: Collection[int]) -> None:
    """Sends SIGKILL to children and their descendants; blocks until the children have ended."""
    for pid in pids:
        descendants.kill_tree(pid)
    for pid in pids:
        descendants.wait_for_exits([pid], _EXIT_LIMIT_S)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def allow_stack_dumps() -> None:
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def show_stacks(pids: Collection[int]) -> None:
    for pid in pids:
        descendants.send_signal(pid, signal.SIGUSR1)


def restore_sigquit(handler: Any) -> None:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL if handler is None else handler)
