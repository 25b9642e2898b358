"""This node's part of a job, as one of its ranks finds it, and the start of its supervisor."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from umbra.runtime.cluster.environment import (
    TorchrunEnvironment,
    bind_to_agent,
    host_address,
    is_secret_file_named,
    log_level,
    secret_file,
    socket_root,
    unique_pid,
)
from umbra.runtime.cluster.guardian_process import GuardianProcess
from umbra.runtime.cluster.job_nodes import check_several_nodes, job_name, own_address
from umbra.runtime.cluster.socket_dir import socket_dir_path
from umbra.runtime.rpc.curve_keys import CurveKeys, sweep_keys
from umbra.runtime.supervisor.supervisor import SupervisorConfig
from umbra.runtime.supervisor.supervisor_main import allow_many_files, start_supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Settings of a session.

    Attributes:
        run_dir: holds logs and `processes.json`; created if missing.
        node_id: this host's name among the job's nodes; the host name by default.
        tcp_host: address at which other nodes reach this one. By default it is
            UMBRA_HOST_ADDRESS; otherwise the address that reaches torchrun's store in a job of
            several nodes, else none.
        attach_timeout_s: longest wait for the supervisor, and for those of the other nodes.
        shutdown_grace_s: time from the end of the job to SIGKILL of its remaining processes.
        trace: whether all processes of the job record their work in `run_dir`/trace; see
            docs/watch.md.
        choices: this node's choices where the user left them open, for `Session.nodes`. Where nodes
            have to agree, the choices of the first count.
    """

    run_dir: Path
    node_id: str = ""
    tcp_host: str = ""
    attach_timeout_s: float = 60.0
    shutdown_grace_s: float = 5.0
    trace: bool = False
    choices: Mapping[str, str | bool] = field(default_factory=dict[str, str | bool])


class NodeLaunch:
    """The names and paths of this node's part of the job: functions of torchrun's environment and
    the configuration, so all ranks of the node find the same. Local rank 0 starts the supervisor.

    Raises ConfigError if torchrun's options do not suit a job of several nodes.
    """

    def __init__(self, config: SessionConfig, environment: TorchrunEnvironment) -> None:
        self._config = config
        self._environment = environment
        self._agent = bind_to_agent()
        allow_many_files()
        owner_pid = os.getpid() if self._agent is None else self._agent.pid
        self.node_id = config.node_id or socket.gethostname()
        self.tcp_host = config.tcp_host or host_address()
        if environment.spans_nodes:
            check_several_nodes(environment)
            # Hosts may have one name, and a host several nodes.
            self.node_id += f"-{unique_pid(owner_pid)}"
            self.tcp_host = self.tcp_host or own_address(*environment.meeting_point)
            self._job = keys_name = job_name(environment)
        else:
            self._job = f"{environment.run_id}-{owner_pid}"
            # Hosts may share a home directory, and a job of one node has a name on its host only.
            keys_name = f"{self._job}-{self.node_id}"
        self._keys_name = keys_name
        self.socket_dir = socket_dir_path(self._job, self.node_id, socket_root())
        self.log_dir = config.run_dir / "logs"
        if environment.node_rank > 0 or environment.nodes_may_change:
            self.log_dir /= self.node_id  # the supervisor stays when rank 0 is elsewhere
        self.trace_dir = str((config.run_dir / "trace").absolute()) if config.trace else ""

    @property
    def secret_file(self) -> Path:
        """The file of the job's keys, if it has some."""
        return secret_file(self._keys_name)

    def start_supervisor(self) -> GuardianProcess:
        """Starts the guardian, which starts the supervisor. Call it inside `delayed_stops`."""
        environment = self._environment
        # Where the nodes may change, the last supervisor removes the file of keys.
        supervisor_owns_keys = environment.nodes_may_change and not is_secret_file_named()
        secret = str(self._make_keys()) if self.tcp_host else ""
        keys_to_remove = "" if is_secret_file_named() or environment.nodes_may_change else secret
        settings = SupervisorConfig(
            node_id=self.node_id,
            log_dir=str(self.log_dir.absolute()),
            run_dir=str(self._config.run_dir.absolute()),
            socket_dir=str(self.socket_dir),
            tcp_host=self.tcp_host,
            secret_file=secret,
            keys_to_remove=keys_to_remove,
            log_level=log_level(),
            trace_dir=self.trace_dir,
            is_lead=environment.node_rank == 0 and not environment.nodes_may_change,
            nodes_may_change=environment.nodes_may_change,
            owns_keys=supervisor_owns_keys,
            torchrun_pid=0 if self._agent is None else self._agent.pid,
        )
        with self._owner_pidfd() as owner_pidfd, contextlib.ExitStack() as until_started:
            if keys_to_remove:
                until_started.callback(Path(keys_to_remove).unlink, missing_ok=True)
            grace_s = self._config.shutdown_grace_s
            guardian = start_supervisor(self._job, settings, owner_pidfd, grace_s)
            until_started.pop_all()
        return guardian

    @contextlib.contextmanager
    def _owner_pidfd(self) -> Generator[int]:
        """A pidfd of the process whose end ends the job; in the block this rank may outlive it."""
        agent = self._agent
        pidfd = os.pidfd_open(os.getpid()) if agent is None else agent.open_pidfd()
        try:
            with contextlib.nullcontext() if agent is None else agent.outlived():
                yield pidfd
        finally:
            os.close(pidfd)

    def _make_keys(self) -> Path:
        if not is_secret_file_named():
            sweep_keys(self.secret_file.parent)
        if not self.secret_file.exists():
            with contextlib.suppress(FileExistsError):  # another node was faster
                CurveKeys.generate().save(self.secret_file)
        return self.secret_file
