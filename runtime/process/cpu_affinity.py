"""Confines a process to the CPU cores near its GPUs, whose NUMA node then gets its memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final

from umbra.runtime.process.nvml import LIBRARY, Nvml

_OWN: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")


def cores_near(processes: Sequence[Sequence[str]], library: str = LIBRARY) -> list[frozenset[int]]:
    """For each process, the allowed cores near its GPUs (see `Nvml.open`); all allowed cores
    without GPUs, without near ones, or without NVML."""
    allowed = frozenset(os.sched_getaffinity(0))
    gpus = sorted({gpu for own in processes for gpu in own})
    nvml = Nvml.open(library, gpus=gpus)
    if nvml is None:
        return [allowed] * len(processes)
    near = dict(zip(gpus, nvml.near_cores(), strict=True))
    nvml.close()
    return [_united([near[gpu] for gpu in own]) & allowed or allowed for own in processes]


def _united(near: Sequence[frozenset[int]]) -> frozenset[int]:
    """Empty if it is empty for one GPU, which may then be near any core."""
    return frozenset[int]().union(*near) if all(near) else frozenset()


def core_shares(cores: Sequence[AbstractSet[int]], quota: float) -> list[int]:
    """Threads for each process: its cores divided by the processes that share any of them, at least
    1. `quota` is the number of CPUs that all may keep busy, see `cpu_quota`."""
    most = quota / len(cores)
    shares = [len(own) // sum(1 for other in cores if own & other) for own in cores]
    return [max(1, int(min(share, most))) for share in shares]


def cpu_quota(own: Path = _OWN, root: Path = _CGROUPS) -> float:
    """CPUs that this process's cgroup, such as a container, may keep busy; infinite without a
    limit. A limited process still sees all of the host's cores."""
    return min([math.inf, *map(_quota_of, _cgroups_of("cpu", own, root))])


def thread_limit(own: Path = _OWN, root: Path = _CGROUPS) -> float:
    """Threads that this process's cgroup may have; infinite without a limit."""
    limits = [math.inf]
    for cgroup in _cgroups_of("pids", own, root):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max" is no limit
            limits.append(int((cgroup / "pids.max").read_text(encoding="utf-8")))
    return min(limits)


def _cgroups_of(controller: str, own: Path, root: Path) -> Iterator[Path]:
    """This process's cgroup and those above it."""
    for line in own.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root  # the first is version 1 of cgroups
        place = top / path.lstrip("/")
        yield from (place, *(up for up in place.parents if up.is_relative_to(top)))


def _quota_of(cgroup: Path) -> float:
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max" is no limit
        quota, period = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError):
        quota = (cgroup / "cpu.cfs_quota_us").read_text(encoding="utf-8")
        period = (cgroup / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    return math.inf


def allowed_threads(num: int) -> int:
    """`num`, or OMP_THREAD_LIMIT if that is less. OpenMP starts no more threads than that. If more
    are set, torch 2.13 leaves their part of a product in bfloat16 uninitialised."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    return min(num, int(limit)) if limit.isdigit() and int(limit) > 0 else num


def confine(cores: AbstractSet[int]) -> None:
    if cores == os.sched_getaffinity(0):
        return
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
