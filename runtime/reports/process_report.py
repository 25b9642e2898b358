"""Reports what a node's processes are doing, from outside, without stopping them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import umbra
from umbra.runtime.process.child_process import ChildLog, process_nbytes
from umbra.runtime.process.descendants import STOPPED, living_descendants, process_stat
from umbra.runtime.process.nvml import Nvml
from umbra.runtime.process.thread_stacks import read_stacks

_NUM_LOG_LINES: Final = 200
_MAX_COMMAND_LEN: Final = 120
_NUM_FRAMES: Final = 3
"""Innermost frames of a thread that the summary shows; the file of stacks has all."""
_STATES: Final = {"R": "running", "S": "waiting"}
_THREAD: Final = re.compile(r"Thread 0x[0-9a-f]+ (.*) \(most recent call first\):")
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_IDLE: Final = re.compile(r"/(selectors|asyncio/\w+|umbra/runtime/actor/function_queue)\.py$")
"""The innermost file of a thread whose event loop or queue of functions has nothing to do."""
_WAITING: Final = re.compile(
    r"/(threading|queue|selectors|asyncio/\w+|zmq/.*|concurrent/futures/\w+"
    r"|umbra/runtime/actor/heartbeat|umbra/trainer/world/signals|umbra/runtime/tracing/spans"
    r"|umbra/engines/embedded/embedded_engine|umbra/runtime/rpc/sync_handle"
    r"|torch/_inductor/.*)\.py$"
)
"""Files that a thread is in while it waits for work, or for its caller's event."""
_REPORTING: Final = re.compile(
    r"/(umbra/runtime/process/thread_stacks|umbra/runtime/reports/process_report)\.py$"
)
_COLLECTIVE: Final = "/torch/distributed/"
_NUM_INNERMOST: Final = 3
"""Frames in which a collective is looked for. With fewer, the frames that torch.ops adds hide it;
with more, a hook of FSDP around the model counts as one."""
_LIBRARIES: Final = (
    f"{Path(umbra.__file__).parent}/",
    f"{sysconfig.get_path('stdlib')}/",
    "/site-packages/",
    "/dist-packages/",
    "<frozen ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenThread:
    """A thread that does not just wait for work: its `function (file:line)` places, innermost
    first, and the innermost in a user's code, or ""."""

    name: str
    places: tuple[str, ...]
    user_place: str
    is_in_collective: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """A process at the time of the report. `NAME's` is a process that NAME has started; `problem`
    is why its threads are unknown, or ""."""

    name: str
    pid: int
    command: str
    state: str
    why_stuck: str
    nbytes: int
    threads: tuple[SeenThread, ...]
    problem: str

    @property
    def is_stopped(self) -> bool:
        return self.why_stuck == STOPPED

    @property
    def rank(self) -> int | None:
        word, _, number = self.name.partition(" ")
        return int(number) if word == "rank" and number.isdigit() else None

    def lines(self) -> list[str]:
        """For people."""
        title = f"{self.name} (pid {self.pid}): {self.state}, {self.nbytes / 2**20:.0f} MiB"
        if self.name.endswith("'s"):
            title += f", {self.command[:_MAX_COMMAND_LEN]}"
        threads = [", called by ".join(thread.places[:_NUM_FRAMES]) for thread in self.threads]
        return [title, *(f"    {line}" for line in (self.problem, *threads) if line)]


def is_of_user(file: str) -> bool:
    return not any(path in file for path in _LIBRARIES)


def report_processes(roots: Mapping[str, int], log_dir: Path) -> dict[str, str]:
    """Files by name: `processes.txt` for people, `processes.json` with a `SeenProcess` for each,
    and one for each process and log. Descendants of `roots` get their names. Blocks for some
    seconds at most."""
    names = _find(roots)
    stacks = read_stacks(list(names))
    processes = [_see(pid, name, stacks[pid]) for pid, name in names.items()]
    files = {
        f"stacks/{process.name.replace(' ', '-')}-{process.pid}.txt": (
            f"{process.command}\n\n{stacks[process.pid]}\n\n{_kernel_threads(process.pid)}\n"
        )
        for process in processes
    }
    lines = [line for process in processes for line in process.lines()]
    files["processes.txt"] = "\n".join(lines) + "\n"
    files["processes.json"] = json.dumps([asdict(process) for process in processes], indent=1)
    files["gpus.txt"] = _describe_gpus()
    for path in sorted(log_dir.glob("*.log")):
        files[f"logs/{path.name}"] = ChildLog(path, 0).tail(_NUM_LOG_LINES) + "\n"
    return files


def _find(roots: Mapping[str, int]) -> dict[int, str]:
    names = {pid: name for name, pid in roots.items() if process_stat(pid) is not None}
    pids = dict.fromkeys(names)
    for root in names:
        pids |= dict.fromkeys(pid for pid, _ in living_descendants(root))
    return {pid: _name(pid, names) for pid in pids}


def _name(pid: int, names: Mapping[int, str]) -> str:
    above = pid
    while above not in names and (stat := process_stat(above)) is not None:
        above = stat.parent_pid
    name = names.get(above, "unknown")
    return name if above == pid else f"{name}'s"


def _see(pid: int, name: str, stacks: str) -> SeenProcess:
    stat = process_stat(pid)
    state = "ended" if stat is None else stat.why_stuck or _STATES.get(stat.state, stat.state)
    is_known = not stacks.startswith("[")
    threads = map(_see_thread, stacks.split("\n\n")) if is_known else ()
    return SeenProcess(
        name=name,
        pid=pid,
        command=_command(pid),
        state=state,
        why_stuck="" if stat is None else stat.why_stuck,
        nbytes=process_nbytes(pid),
        threads=tuple(thread for thread in threads if thread is not None),
        problem="" if is_known or (stat is not None and stat.is_stopped) else stacks[1:-1],
    )


def _see_thread(stack: str) -> SeenThread | None:
    """None if it waits for work, or reports."""
    title = _THREAD.match(stack.lstrip())
    frames: list[tuple[str, str, str]] = _FRAME.findall(stack)
    files = [file for file, _, _ in frames]
    name = title[1] if title else ""
    if not frames or _IDLE.search(files[0]) or any(map(_REPORTING.search, files)):
        return None
    has_users = any(map(is_of_user, files))
    if name != "MainThread" and _WAITING.search(files[0]) and not has_users:
        return None  # a service of umbra or of a library
    busy = [frame for frame in frames if not _WAITING.search(frame[0])]
    if not busy:
        return None
    return SeenThread(
        name=name,
        places=_places(busy),
        user_place=next(iter(_places([frame for frame in busy if is_of_user(frame[0])])), ""),
        is_in_collective=any(_COLLECTIVE in file for file in files[:_NUM_INNERMOST]),
    )


def _places(frames: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    return tuple(f"{function} ({file}:{line})" for file, line, function in frames)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _kernel_threads(pid: int) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        for thread in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            with contextlib.suppress(OSError):
                folder = Path(f"/proc/{pid}/task/{thread}")
                stat = (folder / "stat").read_text(errors="replace")
                name, state = stat[stat.index("(") + 1 : stat.rindex(")")], stat.rpartition(")")[2]
                waits_in = (folder / "wchan").read_text()
                lines.append(f"thread {thread} {name}: {state.split()[0]}, kernel: {waits_in}")
    return "\n".join(lines)


def _describe_gpus() -> str:
    nvml = Nvml.open()
    if nvml is None:
        return "no GPU here\n"
    try:
        uses = nvml.uses()
    finally:
        nvml.close()
    lines = [
        f"GPU {idx}: {use.used_nbytes / 2**30:.1f} of {use.total_nbytes / 2**30:.1f} GiB in use, "
        f"by pid: {', '.join(f'{pid} {n / 2**30:.1f} GiB' for pid, n in use.by_pid.items()) or '-'}"
        for idx, use in enumerate(uses)
    ]
    return "\n".join(lines) + "\n"
