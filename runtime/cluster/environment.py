"""Reads environment variables; no other module of umbra does.

| variable | set by | meaning |
|---|---|---|
| RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE | torchrun | who this process is; without RANK it is rank 0 of 1 |
| GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT | torchrun | which node this is, and where the nodes meet |
| TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS | torchrun | which job, how often its ranks were and may be restarted |
| TORCHELASTIC_USE_AGENT_STORE | torchrun | "False": rank 0 has the ranks' store, another one after each restart; by default torchrun's agent has it |
| TORCHELASTIC_ERROR_FILE | torchrun | with rank and job it names this start of this rank, which tells a wrapper from torchrun's agent |
| CUDA_VISIBLE_DEVICES | user, Slurm | the node's GPUs that the job may use, in its order; unset: all |
| SLURM_JOB_ID | Slurm | part of the name of a job of several nodes |
| UMBRA_HOST_ADDRESS | user | address of this host for other nodes; default: the one that it reaches MASTER_ADDR from, and none in a job of one node |
| UMBRA_SOCKET_ROOT | user | folder for sockets, default /tmp/umbra-UID; must be node-local and short |
| UMBRA_SECRET_FILE | user | file with the job's keys, default ~/.config/umbra/jobs/JOB |
| UMBRA_LOG_LEVEL | user | level of umbra's own processes, default INFO |
| UMBRA_API_KEY | user | the key that clients of `umbra serve` must send, unless `--api-key` is given |
| UMBRA_ACTOR | supervisor | NAME#INCARNATION of the actor that a process belongs to |
"""  # noqa: E501

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final, Self

from umbra.runtime.cluster.socket_dir import default_root
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.torchrun_agent import TorchrunAgent

_HOST_NAMESPACE: Final = 0xEFFFFFFC  # of processes outside of containers, in every kernel

ACTOR_VARIABLE = "UMBRA_ACTOR"
_RANK_VARIABLES: Final = frozenset(
    f"{scope}{name}"
    for scope, names in {
        "": ("RANK", "WORLD_SIZE"),
        "LOCAL_": ("RANK", "WORLD_SIZE"),
        "GROUP_": ("RANK", "WORLD_SIZE"),
        "ROLE_": ("RANK", "WORLD_SIZE", "NAME"),
        "MASTER_": ("ADDR", "PORT"),
    }.items()
    for name in names
)
_RANK_PREFIX: Final = "TORCHELASTIC_"
_START_VARIABLES: Final = ("RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
"""Differs between ranks, jobs and restarts, because the file's folder has a random name."""


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for other processes, without a rank's variables: a library with a process
    group of its own (vLLM) would look for its peers at the ranks' store, and wait forever."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIX)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunEnvironment:
    """This process among the trainer's ranks.

    Attributes:
        local_world_size: ranks on this node.
        node_rank: index of this node among the `num_nodes` of the job.
        meeting_point: host and port of the ranks' store.
        has_own_store: whether rank 0 has that store, which then ends with the ranks; by default
            torchrun's agent has it.
        under_torchrun: whether torchrun started it; otherwise it is rank 0 of 1.
        run_id: torchrun's rendezvous id, "none" by default.
        incarnation: 1 at the first start, one more after each elastic restart.
        may_restart: whether torchrun would start the ranks again if they failed.
        nodes_may_change: whether it may do so on other nodes.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    meeting_point: tuple[str, int]
    has_own_store: bool
    run_id: str
    incarnation: int
    may_restart: bool
    nodes_may_change: bool
    under_torchrun: bool

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Raises ConfigError if a variable is missing or malformed."""
        if "RANK" not in environ:
            return cls(
                rank=0,
                local_rank=0,
                world_size=1,
                local_world_size=1,
                node_rank=0,
                num_nodes=1,
                meeting_point=("", 0),
                has_own_store=False,
                run_id="single",
                incarnation=1,
                may_restart=False,
                nodes_may_change=False,
                under_torchrun=False,
            )
        num_restarts = _read_int(environ, "TORCHELASTIC_RESTART_COUNT", default=0)
        max_restarts = _read_int(environ, "TORCHELASTIC_MAX_RESTARTS", default=0)
        has_own_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
        return cls(
            rank=_read_int(environ, "RANK"),
            local_rank=_read_int(environ, "LOCAL_RANK"),
            world_size=_read_int(environ, "WORLD_SIZE"),
            local_world_size=_read_int(environ, "LOCAL_WORLD_SIZE"),
            node_rank=_read_int(environ, "GROUP_RANK", default=0),
            num_nodes=_read_int(environ, "GROUP_WORLD_SIZE", default=1),
            meeting_point=(
                environ.get("MASTER_ADDR", ""),
                _read_int(environ, "MASTER_PORT", default=0),
            ),
            has_own_store=has_own_store,
            run_id=environ.get("TORCHELASTIC_RUN_ID", "none"),
            incarnation=num_restarts + 1,
            may_restart=num_restarts < max_restarts,
            nodes_may_change=has_own_store and max_restarts > 0,
            under_torchrun=True,
        )

    @property
    def spans_nodes(self) -> bool:
        """Whether the job has several nodes, or may get them."""
        return self.num_nodes > 1 or self.nodes_may_change

    @property
    def round_id(self) -> str:
        """Distinguishes starts of a node's ranks that have the same `incarnation`. torchrun's count
        of restarts is each agent's own, and does not rise when only the nodes change. Rank 0's own
        store is a new one in each round of torchrun's rendezvous."""
        host, port = self.meeting_point
        return f"{host}:{port}" if self.has_own_store else ""


def bind_to_agent(environ: Mapping[str, str] = os.environ) -> TorchrunAgent | None:
    """Makes this rank end when torchrun's agent does, at once if it has ended. A rank calls this
    first. Returns None if no launcher started this process."""
    if "RANK" not in environ:
        return None
    names = _START_VARIABLES if "TORCHELASTIC_RUN_ID" in environ else ()
    return _bind(tuple((name, environ[name]) for name in names if name in environ))


@functools.cache
def _bind(variables: tuple[tuple[str, str], ...]) -> TorchrunAgent:
    return TorchrunAgent.bind(dict(variables))


def visible_gpus(num_gpus: int, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs of this node that CUDA_VISIBLE_DEVICES names, only one MIG instance, out of
    `num_gpus` in the machine. Raises ConfigError for one that is named twice or does not exist."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or num_gpus == 0:
        return tuple(map(str, range(num_gpus)))
    listed = (name.strip() for name in named.split(","))
    names = tuple(takewhile(lambda name: name not in ("", "-1"), listed))
    if len(set(names)) < len(names):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES is {named!r}: name each GPU once")
    if any(name.isdecimal() and int(name) >= num_gpus for name in names):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES is {named!r}, and the GPUs of this machine are 0 to "
            f"{num_gpus - 1}: name some of these"
        )
    return names[:1] if any(name.startswith("MIG-") for name in names) else names


def slurm_job_id(environ: Mapping[str, str] = os.environ) -> str:
    """The job's number, or "" outside Slurm."""
    return environ.get("SLURM_JOB_ID", "")


def host_address(environ: Mapping[str, str] = os.environ) -> str:
    return environ.get("UMBRA_HOST_ADDRESS", "").removeprefix("[").removesuffix("]")


def unique_pid(pid: int) -> str:
    """The process's number; in a container, with its boot and PID namespace, because each container
    has a process 1, and hosts may share a name."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # of a sandbox
        return str(pid)
    if namespace == _HOST_NAMESPACE:
        return str(pid)
    return f"{pid}-{boot[:4]}{namespace % 2**16:04x}"


def socket_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder that holds one directory of sockets per job and node."""
    named = environ.get("UMBRA_SOCKET_ROOT")
    return Path(named) if named else default_root()


def secret_file(job: str, environ: Mapping[str, str] = os.environ) -> Path:
    """File with the job's keys; outside the run directory, which is often shared. Raises
    ConfigError if the user has no home for it, as in a container with a user id of its own."""
    if named := environ.get("UMBRA_SECRET_FILE"):
        return Path(named)
    try:
        return Path.home() / ".config" / "umbra" / "jobs" / job
    except RuntimeError:
        raise ConfigError(
            f"nodes that are linked need a file of keys, and user {os.getuid()} has no home "
            "directory for it: set HOME, or UMBRA_SECRET_FILE to a path that all nodes share"
        ) from None


def is_secret_file_named(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user, not umbra, manages the file with the keys."""
    return bool(environ.get("UMBRA_SECRET_FILE"))


def api_key(given: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The key that clients of `umbra serve` must send, `given` first; "" requires none. Raises
    ConfigError if no HTTP header can hold it."""
    key = given or environ.get("UMBRA_API_KEY", "")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError(
            f"{'--api-key' if given else 'UMBRA_API_KEY'}: a key has printable ASCII characters "
            "only, and no space at either end"
        )
    return key


def log_level(environ: Mapping[str, str] = os.environ) -> int:
    name = environ.get("UMBRA_LOG_LEVEL", "INFO").upper()
    levels = logging.getLevelNamesMapping()
    if name not in levels:
        raise ConfigError(f"UMBRA_LOG_LEVEL is {name!r}; allowed: {', '.join(sorted(levels))}")
    return levels[name]


def _read_int(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(
            f"environment variable {name} is {text!r}, not a number: start with torchrun"
        ) from None
