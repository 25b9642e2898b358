"""A real Slurm of one controller and three nodes, all on this host.

    with SlurmCluster() as cluster:
        job = cluster.submit("job.sbatch", "argument")
        cluster.wait_for_state(job, "COMPLETED", timeout_s=60.0)

Everything is in one temporary folder, and ports are free ones. The nodes claim 64 cores and 8 GPUs
each, so that the templates of launch/slurm run with the resources that they ask for. Processes are
tracked by process group only, so what leaves its group has to end by itself.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Final, Self

from run_traces import command_of

from umbra.runtime.process.descendants import child_pids, living_descendants, send_signal

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
NODES: Final = ("node-a", "node-b", "node-c")
_HOST: Final = Path(__file__).with_name("daemon_host.py")
_START_LIMIT_S: Final = 30.0
_POLL_S: Final = 0.1

_ENDED: Final = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    }
)
"""States that a job does not leave, unlike any other, such as SIGNALING."""


class SlurmCluster:
    """Owns the daemons and the folder. A context manager; leaving it cancels all jobs.

    Attributes:
        environment: what Slurm's commands need to find this cluster.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="umbra-slurm-", dir="/tmp"))
        self._conf = self._folder / "slurm.conf"
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(self._conf)}

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._write_files()
            munge = self._folder / "munge"
            self._start(
                *("munged", "--foreground", "--force", f"--key-file={self._folder}/munge.key"),
                *(f"--socket={munge}.sock", f"--pid-file={munge}.pid"),
                *(f"--log-file={munge}.log", f"--seed-file={munge}.seed"),
            )
            _wait(Path(f"{munge}.sock").exists, _START_LIMIT_S, self.logs)
            self._start("slurmctld", "-D", "-i", "-f", str(self._conf))
            for node in NODES:
                self._start_node(node)
            self._stack.callback(self._end_jobs)
            _wait(self._is_up, _START_LIMIT_S, self.logs)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # -- jobs ----------------------------------------------------------------------------

    def submit(
        self,
        *arguments: str | Path,
        folder: Path,
        environ: Mapping[str, str],
    ) -> str:
        """Submits a batch script with sbatch's options before it; returns the job's id.

        Args:
            folder: in which the job runs.
            environ: the variables of sbatch, which the job inherits.
        """
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            cwd=folder,
            env={**environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def run(self, *command: str) -> str:
        """The output of one of Slurm's commands, which must succeed."""
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`, such as JobState, ExitCode or Restarts."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        found = re.search(rf"\b{name}=(\S*)", shown)
        assert found, shown
        return found[1]

    def wait_for_state(self, job: str, state: str, timeout_s: float, look_at: Path) -> None:
        """Waits until a job is in that state; fails at once if it has ended in another.

        Args:
            look_at: the job's output, which a failure shows.
        """

        def is_there() -> bool:
            found = self.field(job, "JobState")
            assert found == state or found not in _ENDED, f"job {job} is {found}\n{_text(look_at)}"
            return found == state

        _wait(is_there, timeout_s, lambda: _text(look_at))

    def wait_for_restart(self, job: str, timeout_s: float, look_at: Path) -> None:
        """Waits until a heterogeneous job runs again after it was requeued.

        Only the backfill scheduler starts such a job, and it looks at the queue when something has
        changed there, or after two minutes. A change of the job's comment stands for other users.
        """

        def is_back() -> bool:
            found = self.field(job, "JobState")
            assert found not in _ENDED, f"job {job} is {found}\n{_text(look_at)}"
            if found == "PENDING":
                self.run("scontrol", "update", f"JobId={job}", "Comment=waits")
            return found == "RUNNING" and self.field(job, "Restarts") == "1"

        _wait(is_back, timeout_s, lambda: _text(look_at))

    def logs(self) -> str:
        """What the daemons have logged."""
        return "\n".join(_text(path) for path in sorted(self._folder.glob("*.log")))

    # -- the cluster ---------------------------------------------------------------------

    def _write_files(self) -> None:
        self._folder.chmod(0o755)
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in ("state", *NODES):
            (self._folder / name).mkdir()
        for idx in range(8):
            (self._folder / f"gpu{idx}").touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-7]\n")
        ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={socket.gethostname()} Port={port} "
            "CPUs=64 Gres=gpu:8"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        self._conf.write_text(
            _CONF.format(
                folder=self._folder,
                host=socket.gethostname(),
                user=getpass.getuser(),
                port=ports[0],
                nodes=nodes,
                names=",".join(NODES),
            )
        )

    @contextlib.contextmanager
    def without(self, node: str) -> Generator[None]:
        """Within the block, this node is gone, with all that ran on it."""
        _kill(self._nodes[node])
        try:
            yield
        finally:
            self._start_node(node)
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
            _wait(self._is_up, _START_LIMIT_S, self.logs)

    def _start_node(self, node: str) -> None:
        self._nodes[node] = self._start("slurmd", "-D", "-N", node, "-f", str(self._conf))

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{command[0]}-out.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, str(_HOST), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self._stack.callback(_end, process)
        return process

    def _is_up(self) -> bool:
        shown = subprocess.run(
            ["sinfo", "--noheader", "--format=%T %D"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return shown.stdout.split() == ["idle", str(len(NODES))]

    def _end_jobs(self) -> None:
        self.run("scancel", "--user", getpass.getuser())
        _wait(lambda: not self.run("squeue", "--noheader"), 60.0, self.logs)


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to connections: a node that is back finds its own free."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill(host: subprocess.Popen[bytes]) -> None:
    """Kills a daemon. Its host then kills what it has left, which has been stopped before: no
    process of a node that is gone sees the end of another one there."""
    (daemon,) = child_pids(host.pid)[:1]
    for pid, _ in living_descendants(host.pid):
        if not any("resource_tracker" in word for word in command_of(pid)):
            send_signal(pid, signal.SIGSTOP)
    os.kill(daemon, signal.SIGKILL)
    host.wait(20.0)


def _wait(look: Callable[[], bool], timeout_s: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s:\n{explain()}"
        time.sleep(_POLL_S)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else f"(there is no {path})"


# cred_expire is also the time that a requeued job waits. Its default is 120 s, its least value 5 s.
_CONF = """
ClusterName=umbra-test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
