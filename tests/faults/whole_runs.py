"""Real training runs that are to fail: starts them with a deadline, watches and inspects them.

    with start_run(folder, "train.steps=3") as run:
        run.wait_for_step(1)
        os.kill(run.pid_of("policy-0"), signal.SIGKILL)
        ended = run.wait(30.0)  # also asserts that nothing is left behind
    assert ended.status == 0

`RunTraces` distinguishes what a run leaves behind from other processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import preloaded_python
from preloaded_python import PreloadedProcess
from run_traces import RunTraces, command_of, environment_of

from umbra.runtime.process.descendants import child_pids
from umbra.trainer.reporting.metrics_loggers import read_metrics

T = TypeVar("T")

HERE = Path(__file__).parent
START_LIMIT_S = 90.0
"""From the start to the first step; all limits here leave time to a busy machine."""
BAD_INPUT_LIMIT_S = 90.0
"""From the start to the end for bad input."""
END_LIMIT_S = 60.0
"""From a fault in a running training to its end."""
GONE_WITHIN_S = 30.0
"""From the end or the kill of torchrun until all traces of a run must be gone."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a run.

    Attributes:
        status: exit status of torchrun; -N if signal N ended it.
        output: of torchrun and all ranks.
        gone_at: `time.monotonic()` when nothing was left of the run.
        num_ranks: as given to `start_run`.
    """

    status: int
    output: str
    gone_at: float
    num_ranks: int

    def check_failed(self, *words: str, ranks: Sequence[int] | None = None) -> None:
        """Asserts that ranks reported cause and remedy, in `words`, and printed no stack.

        Args:
            ranks: those that must report it; None for all.
        """
        assert self.status != 0, self.output
        for rank in range(max(1, self.num_ranks)) if ranks is None else ranks:
            error = self.error_of(rank)
            for word in words:
                assert word in error, f"rank {rank} does not report {word!r}:\n{self.output}"
        torchruns = re.findall(_STACK_OF_TORCHRUN, self.output, re.MULTILINE)
        assert len(torchruns) <= min(1, self.num_ranks), self.output
        assert self.output.count("Traceback") == len(torchruns), self.output

    def error_of(self, rank: int) -> str:
        """The error that a rank reported; empty if it reported none."""
        found = re.findall(_ERROR_OF.format(rank=rank), self.output, re.MULTILINE)
        assert len(found) <= 1, f"rank {rank} reported more than one error:\n{self.output}"
        return str(found[0]) if found else ""


# From the rank's name to the next rank's report or torchrun's own log lines.
_ERROR_OF = r"^rank {rank}: ((?:.|\n)*?)(?=^rank \d|^[WEI]\d{{4}} |^Traceback|\Z)"
# torchrun's own stack when a rank has failed; a rank's stack begins differently.
_STACK_OF_TORCHRUN = (
    r'^Traceback \(most recent call last\):\n(?:  File "<frozen runpy>", .*\n)*'
    r'  File ".*/torch/distributed/run\.py", '
)


class Run:
    """One training under torchrun, or a single rank without it. Use `start_run`."""

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        *,
        num_ranks: int,
        torchrun: Sequence[str],
        environ: Mapping[str, str],
        program: str,
        socket_root: Path | None,
        prefix: Sequence[str],
        terminal: Terminal | None,
        is_forked: bool,
    ) -> None:
        self.run_dir = folder / "run"
        self.num_ranks = num_ranks
        self.started_s = time.time()
        self._program = program
        self._output = folder / "output.txt"
        self._traces = RunTraces(socket_root)
        self.socket_root = Path(self._traces.environment["UMBRA_SOCKET_ROOT"])
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun]
        command = [*command, "--nproc-per-node", str(num_ranks)] if num_ranks else [sys.executable]
        command += ["-m", program]
        is_wrapped = bool(prefix or terminal)
        if is_forked and is_wrapped and num_ranks:
            command = [sys.executable, preloaded_python.__file__, *command]
        command = [*prefix, *command, *settings]
        variables = _environment() | self._traces.environment | dict(environ)
        self.process: subprocess.Popen[bytes] | PreloadedProcess
        if is_forked and not is_wrapped:
            self.process = PreloadedProcess(command, folder, variables, self._output)
            return
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL if terminal is None else terminal.descriptor,
                stdout=output if terminal is None else terminal.descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if terminal is None else terminal.take,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, timeout_s: float = START_LIMIT_S) -> Ended:
        """Waits for the end of torchrun, which must come in time and leave nothing behind."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            listing = "\n".join(self.living())
            raise AssertionError(
                f"the run did not end within {timeout_s:g} s:\n{listing}\n{self.output}"
            ) from None
        left = self._traces.find(GONE_WITHIN_S)
        assert not left, "left behind:\n" + "\n".join(left)
        gone_at = time.monotonic()
        return Ended(status=status, output=self.output, gone_at=gone_at, num_ranks=self.num_ranks)

    # -- while it runs -------------------------------------------------------------------

    def wait_for(
        self,
        what: str,
        look: Callable[[], T | None],
        timeout_s: float,
        every_s: float = _POLL_S,
    ) -> T:
        """The first value of `look` that is not None; the run must not end meanwhile."""
        deadline = time.monotonic() + timeout_s
        while (found := look()) is None:
            ended = self.process.poll()
            assert ended is None, f"it ended ({ended}) before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s:g} s:\n{self.output}"
            time.sleep(every_s)
        return found

    def wait_for_a_rank(self) -> None:
        """Waits until torchrun has started the first rank, and returns as soon as possible."""
        self.wait_for(
            "a rank",
            lambda: any(self._is_rank(pid) for pid in child_pids(self.process.pid)) or None,
            START_LIMIT_S,
            every_s=0.001,
        )

    def wait_for_step(self, step: int, timeout_s: float = START_LIMIT_S) -> None:
        """Waits until that many steps are in metrics.jsonl."""
        self.wait_for(f"step {step}", lambda: self.num_steps() >= step or None, timeout_s)

    def num_steps(self) -> int:
        rows = read_metrics(self.run_dir / "metrics.jsonl")
        return max((int(row["step"]) for row in rows), default=0)

    def actors(self) -> dict[str, dict[str, Any]]:
        """The content of processes.json."""
        try:
            found: dict[str, dict[str, Any]] = json.loads(
                (self.run_dir / "processes.json").read_text()
            )
        except FileNotFoundError:
            return {}
        return found

    def wait_for_restart(self, name: str, timeout_s: float = 30.0) -> None:
        """Waits until a later incarnation of an actor than the first serves."""

        def is_back() -> bool | None:
            actor = self.actors()[name]
            return (actor["incarnation"] >= 2 and actor["state"] == "RUNNING") or None

        self.wait_for(f"a successor of {name}#1", is_back, timeout_s)

    def pid_of(self, name: str) -> int:
        """Pid of "torchrun", a rank ("rank 1"), "guardian", "supervisor", or an actor by name."""
        if name == "torchrun":
            return self.process.pid
        if name.startswith("rank "):
            wanted = f"RANK={name[5:]}"
            return self._only(lambda pid: self._is_rank(pid) and wanted in environment_of(pid))
        if name in ("guardian", "supervisor"):
            word = {
                "guardian": "guardian.py",
                "supervisor": "umbra.runtime.supervisor.supervisor_main",
            }[name]
            # The guardian's command line contains the supervisor's.
            is_guardian = name == "guardian"
            return self._only(
                lambda pid: (
                    any(part.endswith(word) for part in command_of(pid))
                    and any(part.endswith("guardian.py") for part in command_of(pid)) == is_guardian
                )
            )
        return int(self.actors()[name]["pid"])

    def _only(self, is_it: Callable[[int], bool]) -> int:
        found = [pid for pid in self._traces.pids() if is_it(pid)]
        assert len(found) == 1, (found, self.living())
        return found[0]

    # -- afterwards ----------------------------------------------------------------------

    def living(self) -> list[str]:
        """A line for each living process of the run."""
        return [f"{pid}: {' '.join(command_of(pid))}" for pid in self._traces.pids()]

    def _is_rank(self, pid: int) -> bool:
        return (
            self._program in command_of(pid)
            and any(variable.startswith("RANK=") for variable in environment_of(pid))
            and "torch.distributed.run" not in command_of(pid)
        )

    def kill_all(self, rng: random.Random, *, at_once: bool = False) -> None:
        """Kills every process of the run, in random order. Files in /tmp stay.

        Args:
            at_once: stops all of them before the first is killed, so that none can clean up.
        """
        while pids := self._traces.pids():
            rng.shuffle(pids)
            for pid in pids if at_once else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Ends all processes of the run."""
        self.process.kill()
        self._traces.close()
        self.process.wait()


class Terminal:
    """A terminal window: a process holds its other end, and its end hangs up the terminal.

    The session of the process that takes it then gets SIGHUP, as when a window or ssh is closed.

    Args:
        output: file that gets what the terminal shows; None for nowhere.
    """

    def __init__(self, output: Path | None = None) -> None:
        self._keyboard, self.descriptor = os.openpty()
        with open(output or os.devnull, "wb") as shown:
            self._window = subprocess.Popen(
                ["cat"], stdin=self._keyboard, stdout=shown, stderr=subprocess.DEVNULL
            )

    def take(self) -> None:
        """Called in the new process, which leads its session."""
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def press_ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def close_window(self) -> None:
        if self._keyboard >= 0:
            os.close(self._keyboard)
            self._keyboard = -1
        self._window.kill()
        self._window.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_window()
        os.close(self.descriptor)


@contextlib.contextmanager
def start_run(
    folder: Path,
    *settings: str,
    num_ranks: int = 2,
    torchrun: Sequence[str] = ("--standalone",),
    environ: Mapping[str, str] | None = None,
    program: str = "umbra.trainer",
    socket_root: Path | None = None,
    prefix: Sequence[str] = (),
    terminal: Terminal | None = None,
    is_forked: bool = True,
) -> Generator[Run]:
    """Starts a run whose config is `folder`/config.toml (see `write_config`) plus `settings`.

    Args:
        num_ranks: 0 is one rank without torchrun, which starts faster.
        program: the module that every rank runs.
        socket_root: the caller's, which outlives the run; None for a folder of its own.
        prefix: a program that runs the command line that follows it, such as a shell.
        terminal: controls the run and shows its output; None for no terminal.
        is_forked: torchrun and the ranks are forks of a process that has imported torch (see
            `preloaded_python`; needs the fixture `fork_server`). With a `prefix` or `terminal` only
            the ranks are.
    """
    run = Run(
        folder,
        ["config.toml", *settings],
        num_ranks=num_ranks,
        torchrun=torchrun,
        environ=environ or {},
        program=program,
        socket_root=socket_root,
        prefix=prefix,
        terminal=terminal,
        is_forked=is_forked,
    )
    try:
        yield run
    finally:
        run.close()


def write_config(folder: Path, assets: Path) -> None:
    """Writes `folder`/config.toml: the smallest possible run, on the engine without a model."""
    (folder / "config.toml").write_text(_CONFIG.format(assets=assets, here=HERE))


_CONFIG = """
[run]
dir = "run"
[model]
path = "{assets}/model"
[data]
train = "{assets}/train.jsonl"
[reward]
function = "failing_rewards:zero"
python_path = ["{here}"]
[rollout]
groups_per_step = 4
group_size = 2
max_new_tokens = 8
[pool]
engine = "echo"
engine_args = {{vocab_size = 42}}
max_context_len = 32
tick_ms = 20.0
num_threads = 1
[train]
steps = 2
learning_rate = 1e-3
log_entropy = false
export = false
max_logprob_difference = 1e9
"""


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UMBRA_", "TORCHELASTIC_"))}
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
