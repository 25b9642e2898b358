"""torchrun's agent as a rank sees it: the process that every rank of a node must end with.

torchrun does not identify its agent to a rank, so a rank examines its parent. If the agent was
killed before that look, the rank has been adopted: its parent is the nearest subreaper above it
(`systemd --user`, slurmstepd, a test runner) or the first process of the PID namespace (init,
tini, a container's entry point). A rank that is bound to such a process would live for ever. The
kernel keeps no record of an adoption, so the process above counts as the agent only if one of two
facts is certain:

- It runs torchrun with our own program: it has our interpreter and torchrun's module, and its
  command line ends in ours. Nearly every job passes here, even if torchrun is the first process
  of a container.
- It cannot adopt. All orphans of a process tree go to the same process, and an orphan that we make
  shows which. Any other process is above us because it started us: programs that use torch's agent
  as a library, and wrappers.

The interpreter alone proves nothing, because entry points of containers are often Python, too. Two
cases cannot be distinguished: a container's entry point is a torchrun with the very command line of
one started beside it, or a subreaper has ceased to be one since it adopted us.

A wrapper is a process between torchrun and the rank that stays there instead of becoming the rank
by `exec`: a shell or a profiler (`torchrun --no-python strace -f python train.py`). It has the same
variables of torchrun as the rank, and the agent is the first process above without them. A wrapper
of another user (sudo) does not show its variables, and is taken for the agent.

Standard library only: this is the first code that a rank runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Self

from umbra.runtime.process import prctl
from umbra.runtime.process.descendants import process_stat

_TORCHRUN_PROGRAMS: Final = ("torchrun", "torch.distributed.run")
_PRINT_ADOPTER: Final = """
import os
if os.fork():
    os._exit(0)
os.read(0, 1)
os.write(1, b"%d" % os.getppid())
"""
"""The process ends at once. Its child waits for the end of stdin, and then prints its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunAgent:
    """The agent of this rank, or whichever launcher started it. `lineage` goes from our
    parent, maybe a wrapper, up to the agent; `variables` distinguish wrappers, and are empty
    without torchrun."""

    lineage: tuple[int, ...]
    variables: Mapping[str, str]

    @classmethod
    def bind(cls, variables: Mapping[str, str]) -> Self:
        """Ends this process with its launcher, at once if that has ended. `variables` are
        torchrun's for this rank alone. Main thread only: the kernel, which ends it with its
        parent, forgets the request with the thread that made it; our thread ends it with an agent
        above a wrapper."""
        # Before the first look, so that an end after the look is not missed.
        prctl.set_parent_death_signal(signal.SIGKILL)
        agent = cls(lineage=_lineage(variables), variables=variables)
        if variables and not agent._is_certain():
            agent._exit()
        if len(agent.lineage) > 1:
            fds = (agent.open_pidfd(),)
            threading.Thread(target=_end_with, args=fds, name="umbra-agent", daemon=True).start()
        else:
            agent.check()
        return agent

    @property
    def pid(self) -> int:
        return self.lineage[-1]

    def open_pidfd(self) -> int:
        """A pidfd of the agent, for the caller to close. Ends this process if the agent has."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._exit()
        self.check()  # A later process with the same pid is not above us.
        return pidfd

    def check(self) -> None:
        """Ends this process, with a line on stderr and status 1, if the agent has ended."""
        if _lineage(self.variables) != self.lineage:
            self._exit()

    @contextlib.contextmanager
    def outlived(self) -> Generator[None]:
        """This process outlives its parent within the block, which must not stop half done."""
        prctl.set_parent_death_signal(0)
        try:
            yield
        finally:
            prctl.set_parent_death_signal(signal.SIGKILL)
            self.check()

    def _is_certain(self) -> bool:
        """Whether it started us rather than adopted us: see the top of the module."""
        if self._runs_torchrun():
            return True
        # Pid 0 stands for a process outside our PID namespace, which cannot be watched.
        return self.pid != 0 and _adopter_pid() not in (os.getpid(), *self.lineage)

    def _runs_torchrun(self) -> bool:
        try:
            if os.readlink(f"/proc/{self.pid}/exe") != os.readlink("/proc/self/exe"):
                return False
            command = _command(self.pid)
            child = sys.orig_argv if len(self.lineage) == 1 else _command(self.lineage[-2])
        except OSError:  # it has ended, or belongs to another user
            return False
        words, given = _without_options(command), _without_options(child)
        is_torchrun = bool(words) and os.path.basename(words[0]) in _TORCHRUN_PROGRAMS
        return is_torchrun and bool(given) and words[-len(given) :] == given

    def _exit(self) -> NoReturn:
        """Exits like an orphan; the parent may be one that adopted this process."""
        pid = _lineage(self.variables)[-1]
        try:
            name = _read(pid, "comm").decode(errors="replace").strip()
        except OSError:
            name = "?"
        who = f"rank {self.variables['RANK']}: " if self.variables else ""
        prctl.exit_as_orphan(
            f"{who}torchrun's agent has ended: above this rank is process {pid} ({name}), which "
            "adopts orphans and does not run torchrun with this program. If it launches ranks "
            "itself, start it below an init process (docker run --init)."
        )


def _lineage(variables: Mapping[str, str]) -> tuple[int, ...]:
    lineage = [os.getppid()]
    while variables and _is_wrapper(lineage[-1], variables):
        stat = process_stat(lineage[-1])
        if stat is None:
            break  # It has just ended, so the next look finds another lineage.
        lineage.append(stat.parent_pid)
    return tuple(lineage)


def _is_wrapper(pid: int, variables: Mapping[str, str]) -> bool:
    try:
        environ = _read(pid, "environ").split(b"\0")
    except OSError:
        return False
    return all(os.fsencode(f"{name}={value}") in environ for name, value in variables.items())


def _command(pid: int) -> list[str]:
    return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:-1]]


def _without_options(command: Sequence[str]) -> list[str]:
    return list(itertools.dropwhile(lambda word: word.startswith("-"), command[1:]))


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def _adopter_pid() -> int:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PRINT_ADOPTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as helper:
        helper.wait()  # From here on its child is an orphan.
        return int(helper.communicate()[0])


def _end_with(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os.kill(os.getpid(), signal.SIGKILL)
