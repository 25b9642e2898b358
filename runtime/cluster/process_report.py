"""Reports what the processes of a job on one node are doing, from outside: nothing is stopped or
killed, and no process has to cooperate."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umbra.runtime.process.child_log import ChildLog
from umbra.runtime.process.child_process import resident_nbytes
from umbra.runtime.process.descendants import living_descendants, process_stat
from umbra.runtime.process.nvml import Nvml
from umbra.runtime.process.thread_stacks import read_stacks

_NUM_LOG_LINES: Final = 200
_MAX_COMMAND_LEN: Final = 120
_NUM_FRAMES: Final = 3
"""Innermost frames of a thread that the summary shows; the file of stacks has all."""
_STATES: Final = {"R": "running", "S": "waiting"}
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LOOP: Final = re.compile(r"/(selectors|asyncio/\w+)\.py$")
"""The innermost file of a thread whose event loop has nothing to do."""
_WAITING: Final = re.compile(
    r"/(threading|queue|selectors|asyncio/\w+|zmq/.*|concurrent/futures/\w+"
    r"|umbra/runtime/actor/heartbeat|umbra/trainer/signals|umbra/runtime/process/thread_stacks"
    r"|umbra/runtime/cluster/process_report|umbra/runtime/tracing/trace_writer"
    r"|torch/_inductor/.*)\.py$"
)
"""Files that a thread is in while it waits for work, or for what its caller waits for."""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    name: str
    command: str


def report_processes(roots: Mapping[str, int], log_dir: Path) -> dict[str, str]:
    """Files by name: `processes.txt`, the summary, and one for each process and log. Blocks for
    some seconds at most.

    Args:
        roots: pids by name; processes below one that have no name of their own get its name.
        log_dir: of this node.
    """
    processes = _find(roots)
    stacks = read_stacks([process.pid for process in processes])
    files = {
        f"stacks/{process.name}-{process.pid}.txt": (
            f"{process.command}\n\n{stacks[process.pid]}\n\n{_kernel_threads(process.pid)}\n"
        )
        for process in processes
    }
    lines = [line for process in processes for line in _summary(process, stacks[process.pid])]
    files["processes.txt"] = "\n".join(lines) + "\n"
    files["gpus.txt"] = _describe_gpus()
    for path in sorted(log_dir.glob("*.log")):
        files[f"logs/{path.name}"] = ChildLog(path, 0).tail(_NUM_LOG_LINES) + "\n"
    return files


def _find(roots: Mapping[str, int]) -> list[_Process]:
    names = {pid: name for name, pid in roots.items() if process_stat(pid) is not None}
    pids = dict.fromkeys(names)
    for root in names:
        pids |= dict.fromkeys(pid for pid, _ in living_descendants(root))
    return [_Process(pid, _name(pid, names), _command(pid)) for pid in pids]


def _name(pid: int, names: Mapping[int, str]) -> str:
    """Its own, or that of the nearest process above it that has one."""
    above = pid
    while above not in names and (stat := process_stat(above)) is not None:
        above = stat.parent_pid
    name = names.get(above, "unknown")
    return name if above == pid else f"{name}'s"


def _summary(process: _Process, stacks: str) -> list[str]:
    stat = process_stat(process.pid)
    state = "ended" if stat is None else stat.why_stuck or _STATES.get(stat.state, stat.state)
    memory = resident_nbytes(process.pid) / 2**20
    title = f"{process.name} (pid {process.pid}): {state}, {memory:.0f} MiB"
    if process.name.endswith("'s"):
        title += f", {process.command[:_MAX_COMMAND_LEN]}"
    if stacks.startswith("["):
        return [title, f"    {stacks[1:-1]}"]
    places = filter(None, map(_place, stacks.split("\n\n")))
    return [title, *(f"    {place}" for place in places)]


def _place(stack: str) -> str:
    """Where a thread is; empty if it waits for work."""
    frames: list[tuple[str, str, str]] = _FRAME.findall(stack)
    if not frames or _LOOP.search(frames[0][0]):
        return ""
    shown = [f"{name} ({file}:{line})" for file, line, name in frames if not _WAITING.search(file)]
    return ", called by ".join(shown[:_NUM_FRAMES])


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return command.replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _kernel_threads(pid: int) -> str:
    """The state of each thread, and the function of the kernel that it waits in."""
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
