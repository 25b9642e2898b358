"""Runs a function in n processes with `torch.distributed` initialised, for tests.

    def add_up(rank_offset: int) -> float:
        total = torch.tensor(float(dist.get_rank() + rank_offset))
        dist.all_reduce(total)
        return total.item()

    def test_sums_over_ranks(distributed_world: DistributedWorld) -> None:
        assert distributed_world(add_up, 1, num_ranks=2) == [3.0, 3.0]

Ranks find each other through a file, so no port is taken. The function is imported by name in
each rank; arguments and results travel as umbra's wire values (plain data and numpy arrays).
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgpack

from umbra.runtime.errors import UmbraError
from umbra.runtime.process import descendants
from umbra.runtime.process.descendants import process_stat
from umbra.runtime.process.prctl import die_with_parent, exit_as_orphan
from umbra.runtime.process.process_end import ExitStatus
from umbra.runtime.rpc.wire import Decoder, Encoder

T = TypeVar("T")

# Time from the first rank's failure to the end of the others, which mostly fail with it, with more
# useful errors than a kill. A longer time makes a failing test slow.
_OTHERS_GRACE_S: Final = 2.0
_STACK_DUMP_WAIT_S: Final = 0.5
_OUTPUT_MAX_CHARS: Final = 4000


class RankFailed(UmbraError):
    """A rank, first `rank`, raised, died or was late; with its traceback and last output."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(rank, message)
        self.rank = rank
        self.message = message

    def __str__(self) -> str:
        return self.message


class RankProcess(Protocol):
    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit status, -N if signal N ended it; None while it runs."""
        ...

    def wait(self, timeout: float | None = None, /) -> int: ...


StartRank = Callable[[Sequence[str], Mapping[str, str], Path], RankProcess]
"""Starts a rank: the command, its whole environment, and the file for its output."""


def start_interpreter(
    command: Sequence[str], environment: Mapping[str, str], output_path: Path
) -> RankProcess:
    with output_path.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class _Rank:
    def __init__(
        self,
        rank: int,
        call: WorldCall,
        folder: Path,
        env: Mapping[str, str],
        start: StartRank,
    ) -> None:
        self.rank = rank
        self.status: int | None = None
        self.ended_at: float | None = None
        self._outcome_path = folder / f"rank{rank}.outcome"
        self._output_path = folder / f"rank{rank}.log"
        call_path = folder / f"rank{rank}.call"
        call_path.write_bytes(_pack(call))
        command = [
            *(sys.executable, "-m", "umbra.runtime.testing.distributed_world"),
            *(str(os.getpid()), str(call_path), str(self._outcome_path)),
        ]
        self.process = start(command, env, self._output_path)

    def poll(self) -> bool:
        if self.status is None and (status := self.process.poll()) is not None:
            self.status = status
            self.ended_at = time.monotonic()
        return self.status is not None

    def kill(self) -> None:
        if not self.poll():
            descendants.kill_tree(self.process.pid)
            self.status = self.process.wait(30.0)

    def outcome(self) -> WorldOutcome:
        if self._outcome_path.exists():
            return _unpack(WorldOutcome, self._outcome_path.read_bytes())
        return WorldOutcome(error=f"its process {ExitStatus(self.status)}")

    def describe(self, outcome: WorldOutcome) -> str:
        output = self._output_path.read_text(errors="replace")[-_OUTPUT_MAX_CHARS:].rstrip()
        parts = [f"rank {self.rank}: {outcome.error}", outcome.traceback.rstrip()]
        if output:
            parts.append(f"its output:\n{output}")
        return "\n".join(part for part in parts if part)


class DistributedWorld:
    """Callable: starts the ranks, waits, and returns their results in order of rank."""

    def __init__(self, folder: Path, start: StartRank = start_interpreter) -> None:
        self._folder = folder
        self._start = start
        self._numbers = itertools.count()

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        num_ranks: int = 2,
        timeout_s: float = 60.0,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs `function(*args, **kwargs)` on every rank.

        Args:
            timeout_s: for everything, imports included; also the process group's limit.
            env: added to the environment of the ranks.

        Raises:
            RankFailed: a rank raised, died, or was late; all ranks have ended by then.
            ValueError: the function cannot be imported by name, for example a lambda.
        """
        name = function.__qualname__
        if "<" in name or function.__module__ == "__main__":
            raise ValueError(
                f"{function.__module__}.{name} cannot be imported in another process: define it at "
                "the top of a module"
            )
        folder = self._folder / f"world{next(self._numbers)}"
        folder.mkdir()
        call = WorldCall(
            module=function.__module__,
            function=name,
            args=list(args),
            kwargs=kwargs,
            store_path=str(folder / "store"),
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            backend=backend,
            sys_path=sys.path,
        )
        with contextlib.ExitStack() as stack:
            ranks: list[_Rank] = []
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, env or {})
                member = _Rank(rank, call, folder, environment, self._start)
                stack.callback(member.kill)
                ranks.append(member)
            late = _wait(ranks, time.monotonic() + timeout_s)
            if late:
                _dump_stacks(late)
        return _collect(ranks, {member.rank for member in late}, timeout_s)


def _wait(ranks: Sequence[_Rank], deadline: float) -> list[_Rank]:
    while True:
        running = [member for member in ranks if not member.poll()]
        failed = [member for member in ranks if member.status]
        if failed:
            ends = [member.ended_at for member in failed if member.ended_at is not None]
            deadline = min(deadline, min(ends) + _OTHERS_GRACE_S)
        left_s = deadline - time.monotonic()
        if not running or left_s <= 0:
            return [] if failed else running
        descendants.wait_for_exits([member.process.pid for member in running], left_s)


def _dump_stacks(late: Sequence[_Rank]) -> None:
    for member in late:
        descendants.send_signal(member.process.pid, signal.SIGUSR1)
    pids = [member.process.pid for member in late]
    descendants.wait_for_exits(pids, _STACK_DUMP_WAIT_S)


def _collect(ranks: Sequence[_Rank], late: set[int], timeout_s: float) -> list[Any]:
    outcomes = [member.outcome() for member in ranks]
    failed = [member for member in ranks if outcomes[member.rank].error]
    if not failed:
        return [outcome.value for outcome in outcomes]
    for rank in late:
        outcomes[rank] = WorldOutcome(error=f"was not done within {timeout_s:g} s")
    # The first failure is the cause. Ranks that were killed because of it have no `ended_at`.
    failed.sort(key=lambda member: (member.ended_at is None, outcomes[member.rank].failed_at))
    texts = [member.describe(outcomes[member.rank]) for member in failed]
    raise RankFailed(failed[0].rank, "\n\n".join(texts))


def _environment(rank: int, num_ranks: int, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        # A host's own name may not resolve; all ranks are on this host.
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **extra,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldCall:
    """One rank's task in a test's world. `store_path` is the file through which the ranks find each
    other; `sys_path` the caller's, so that test modules can be imported."""

    module: str
    function: str
    args: list[Any]
    kwargs: dict[str, Any]
    store_path: str
    num_ranks: int
    timeout_s: float
    backend: str
    sys_path: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOutcome:
    """One rank's result: `error` is empty where there is a `value`. `failed_at` is the rank's
    time.monotonic() when the function raised; 0 for other errors."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    failed_at: float = 0.0


def _pack(value: WorldCall | WorldOutcome) -> bytes:
    header, frames = Encoder().encode({f.name: getattr(value, f.name) for f in fields(value)})
    packed: bytes = msgpack.packb([header, *(bytes(frame) for frame in frames)])
    return packed


def _unpack(kind: type[T], data: bytes) -> T:
    header, *frames = msgpack.unpackb(data)
    (value,) = Decoder().decode(header, frames)
    return kind(**value)


def main() -> None:
    """One rank's process: `python -m umbra.runtime.testing.distributed_world TEST CALL OUTCOME`.

    It imports the function, initialises `torch.distributed` and writes the function's result or
    error to the file OUTCOME; the exit status is 1 after an error. It ends with its parent, which
    is the process TEST or ends with it. SIGUSR1 makes it write the stacks of all threads to its
    output.
    """
    die_with_parent(os.getppid())
    test = process_stat(int(sys.argv[1]))
    if test is None or test.is_ending:  # it ended before the kernel knew that this one should
        exit_as_orphan("the test has ended: exiting")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    call = _unpack(WorldCall, Path(sys.argv[2]).read_bytes())
    sys.path[:] = call.sys_path
    try:
        data = _pack(WorldOutcome(value=_run(call)))
        status = 0
    except Exception as error:  # noqa: BLE001 -- passed to the test's process
        failed_at = time.monotonic()
        text = f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
        data = _pack(WorldOutcome(error=text, traceback=trace, failed_at=failed_at))
        status = 1
    path = Path(sys.argv[3])
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(path)
    # No orderly end: it takes a second with torch, and a broken process group may block in
    # its destructor.
    sys.stdout.flush()
    os._exit(status)


def _run(call: WorldCall) -> object:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.store_path}",
        rank=int(os.environ["RANK"]),
        world_size=call.num_ranks,
        timeout=timedelta(seconds=call.timeout_s),
    )
    function: Any = importlib.import_module(call.module)
    for part in call.function.split("."):
        function = getattr(function, part)
    value = function(*call.args, **call.kwargs)
    # A rank that leaves early would break connections that others still use.
    dist.barrier()
    dist.destroy_process_group()
    return value


if __name__ == "__main__":
    main()
