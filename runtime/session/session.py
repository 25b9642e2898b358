"""The synchronous face of umbra for SPMD code under torchrun.

    with Session.from_torchrun(SessionConfig(run_dir=Path("runs/mine"))) as session:
        if session.rank == 0:
            session.spawn(ActorSpec(name="echo", target="my_module:Echo"))
        echo = session.actor("echo")
        print(echo.call("echo", "hello", timeout_s=5.0))

Entering attaches this rank to its node's supervisor, which local rank 0 starts. Leaving detaches
it; once every local rank has left, the supervisor ends all processes it owns. If a rank leaves by
an exception or dies, every blocked call on the other ranks, on all nodes, raises `JobFailed`.
Calls run on a background event-loop thread, so the caller's code stays synchronous.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.cluster.environment import TorchrunEnvironment, visible_gpus
from umbra.runtime.cluster.guardian_process import GuardianProcess
from umbra.runtime.cluster.job_nodes import (
    JobNode,
    failure_reported,
    key_digest,
    meet_nodes,
    next_epoch,
)
from umbra.runtime.cluster.run_requests import supervisor_ref
from umbra.runtime.cluster.socket_dir import FD_SOCKET, is_in_use
from umbra.runtime.errors import ConfigError, ConnectionLost, JobFailed, UmbraError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.process.nvml import count_gpus, gpu_sizes
from umbra.runtime.process.signal_handling import delayed_stops
from umbra.runtime.process.thread_stacks import answering_stack_requests
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.sync_handle import LoopThread, Pool, SyncHandle
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.session.launch import NodeLaunch, SessionConfig
from umbra.runtime.settings import from_wire, to_wire
from umbra.runtime.tracing.spans import recording
from umbra.runtime.weights.sync_messages import Answer, SyncMessage, decode_answer, encode

logger = logging.getLogger(__name__)

# Deadline for the supervisor to pass a signal on. Later the grace period of the signal is over.
_PASS_ON_LIMIT_S: Final = 10.0


class Session:
    """One rank's attachment to its node's supervisor. A context manager."""

    def __init__(
        self,
        config: SessionConfig,
        environment: TorchrunEnvironment,
        on_note: Callable[[str], None] | None = None,
        on_failed: Callable[[JobFailed], None] | None = None,
        on_signal: Callable[[int, float | None], None] | None = None,
    ) -> None:
        """Use `from_torchrun`."""
        self._config = config
        self._environment = environment
        self._on_note = on_note or _log_note
        self._on_failed = on_failed or self._log_failure
        self._on_signal = on_signal or self._fail_by_signal
        self._node = NodeLaunch(config, environment)
        self._loop = LoopThread("umbra-session")
        self._stack = contextlib.ExitStack()
        self._attached = threading.Event()
        self._has_met = threading.Event()  # set also if the job is lost
        self._nodes: tuple[JobNode, ...] = ()
        self._supervisor_lost = False
        self._is_closing = False
        self._guardian: GuardianProcess | None = None
        self._tcp_endpoint = ""  # of this node's supervisor
        self._epoch = 0  # of the job's nodes; before they have met, the last one
        self._request_name = ""  # see `JobNode.job`
        self._was_stopped = False  # by a signal
        self._client: Client
        self._supervisor: Handle

    @classmethod
    def from_torchrun(
        cls,
        config: SessionConfig,
        *,
        on_note: Callable[[str], None] | None = None,
        on_failed: Callable[[JobFailed], None] | None = None,
        on_signal: Callable[[int, float | None], None] | None = None,
    ) -> Self:
        """Every rank calls it. Without torchrun the process is rank 0 of 1.

        From here on the rank ends with torchrun's agent (at once if the agent has ended already).

        In a job of several nodes each node has a supervisor of its own, linked to that of rank 0's
        node. The ranks of a node find its own actors, those of rank 0's node, and those that were
        started by their node's index. Pools belong to rank 0's supervisor; their engines may be on
        any node, and end with the last rank there. A rank's failure is reported on all nodes. If
        torchrun starts the ranks again, even on other nodes, the supervisors and the engines stay.

        Args:
            on_note: called with each line for the operator (engine died, restarted, caught up), on
                the session's thread; logged by default.
            on_failed: called, on the session's thread, when the job is lost; logged by default. A
                blocked call of the session raises the same error; a rank that is elsewhere learns
                it only from this callback.
            on_signal: called, on the session's thread, with the number of a stop signal that
                another process of the job got: a rank that passed it on (`pass_on_signal`),
                the supervisor or the guardian. `umbra stop` and `umbra preempt` come as
                SIGTERM and SIGUSR1, with the seconds that the work in progress may take. By
                default the job fails.

        Raises:
            ConfigError: torchrun's environment is incomplete, or does not suit several nodes.
        """
        return cls(config, TorchrunEnvironment.read(), on_note, on_failed, on_signal)

    @property
    def node_id(self) -> str:
        return self._node.node_id

    @property
    def rank(self) -> int:
        return self._environment.rank

    @property
    def local_rank(self) -> int:
        return self._environment.local_rank

    @property
    def world_size(self) -> int:
        return self._environment.world_size

    @property
    def incarnation(self) -> int:
        """1 at the first start, more after each elastic restart; the same on all ranks."""
        is_counted = self._environment.nodes_may_change
        return self._epoch if is_counted else self._environment.incarnation

    @property
    def socket_dir(self) -> Path:
        return self._node.socket_dir

    @property
    def fd_socket(self) -> str:
        """The node's descriptor server."""
        return str(self._node.socket_dir / FD_SOCKET)

    @property
    def tcp_host(self) -> str:
        """Address of this node for the others; "" for none."""
        return self._node.tcp_host

    @property
    def log_dir(self) -> Path:
        """Folder of the logs of this node's processes."""
        return self._node.log_dir

    @property
    def nodes(self) -> tuple[JobNode, ...]:
        """All nodes with ranks, in their order; empty in a job that listens on no address."""
        return self._nodes

    def __enter__(self) -> Self:
        node = self._node
        with contextlib.ExitStack() as stack, failure_reported(self._environment):
            stack.enter_context(answering_stack_requests())
            stack.enter_context(recording(node.trace_dir, node.node_id, f"rank-{self.rank}"))
            try:
                if self.local_rank == 0 and not is_in_use(node.socket_dir):
                    with delayed_stops():
                        self._guardian = stack.enter_context(node.start_supervisor())
                    self._guardian.wait_ready(self._config.attach_timeout_s)
                stack.enter_context(self._loop)
                self._client = self._loop.run(self._open_client())
                stack.callback(self._close_client)
                ref = supervisor_ref(node.node_id, node.socket_dir)
                self._supervisor = self._lead = self._client.handle(ref, awaits_start=True)
                self._loop.start(self._follow_events())
                self._await_attached()
                if node.tcp_host:
                    # Local rank 0 made the keys before it started the supervisor.
                    self._client.keys = CurveKeys.load(node.secret_file)
                    self._meet_other_nodes()
            except BaseException as error:
                if self._attached.is_set():
                    self._leave(error)
                if self._guardian is not None:
                    self._guardian.stop(self._config.shutdown_grace_s + 5.0)
                raise
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        try:
            self._leave(error)
        finally:
            self._stack.close()

    def _leave(self, error: BaseException | None) -> None:
        # An exit status of 0 is an orderly end, even if it interrupts something here.
        is_exit = isinstance(error, SystemExit) and not error.code
        if error is not None and not is_exit and not isinstance(error, JobFailed):
            self._send_last("fail_job", f"rank {self.rank}", f"{type(error).__name__}: {error}")
        self._send_last("detach", self.rank)

    @property
    def _is_outlived(self) -> bool:
        """Whether the supervisor stays for the ranks that torchrun starts next."""
        environment = self._environment
        if self._loop.failure is not None:
            return environment.may_restart
        return environment.nodes_may_change and self._was_stopped

    async def _open_client(self) -> Client:
        return Client(self._node.node_id)

    def _close_client(self) -> None:
        async def close() -> None:
            self._is_closing = True
            self._client.close()

        self._loop.run(close(), even_if_failed=True)
        if self._guardian is not None and not self._is_outlived:
            self._guardian.wait(self._config.shutdown_grace_s + 5.0)

    async def _follow_events(self) -> None:
        """Holds the attachment and acts on the supervisor's events."""
        environment = self._environment
        arguments = (
            environment.rank,
            environment.local_world_size,
            os.getpid(),
            environment.incarnation,
            environment.may_restart,
            environment.round_id,
        )
        try:
            async with self._supervisor.stream("attach", *arguments, timeout_s=None) as events:
                async for event in events:
                    if event["kind"] == "attached":
                        self._tcp_endpoint, self._epoch = event["tcp_endpoint"], event["epoch"]
                        self._request_name = event["job"]
                        self._attached.set()
                    elif event["kind"] == "nodes":
                        self._epoch = event["epoch"]
                        self._nodes = tuple(from_wire(JobNode, raw) for raw in event["nodes"])
                        self._has_met.set()
                    elif event["kind"] == "failed":
                        self._fail(JobFailed(event["message"]))
                    elif event["kind"] == "note":
                        self._on_note(event["text"])
                    elif event["kind"] == "signal":
                        self._was_stopped = True
                        self._on_signal(event["number"], event["grace_s"])
        except ConnectionLost:
            self._fail(self._supervisor_loss())
        except Exception as error:  # noqa: BLE001 -- nothing else would report it, and all wait
            if not self._is_closing:  # otherwise our own end came before the stream's
                self._fail(JobFailed(f"rank {self.rank} lost its supervisor: {error!r}"))
        finally:
            self._attached.set()
            self._has_met.set()

    def _meet_other_nodes(self) -> None:
        """Returns once the supervisors of all nodes are linked."""
        timeout_s = self._config.attach_timeout_s
        if self._guardian is not None or (self._environment.spans_nodes and self.local_rank == 0):
            gpus = visible_gpus(count_gpus())
            me = JobNode(
                node_id=self._node.node_id,
                num_ranks=self._environment.local_world_size,
                gpus=gpus,
                gpu_nbytes=tuple(gpu_sizes(gpus)),
                tcp_endpoint=self._tcp_endpoint,
                key_digest=key_digest(CurveKeys.load(self._node.secret_file)),
                epoch=self._epoch,
                job=self._request_name,
                choices=self._config.choices,
            )
            nodes = (me,)
            if self._environment.spans_nodes:
                nodes = meet_nodes(self._environment, me, self._config.run_dir, timeout_s)
            self.supervisor_call(
                "join_job",
                [to_wire(node) for node in nodes],
                self._environment.node_rank,
                next_epoch(nodes),
                timeout_s,
                timeout_s=timeout_s + 1.0,
            )
        is_in_time = self._has_met.wait(2 * timeout_s)
        if self._loop.failure is not None:
            raise self._loop.failure
        if not is_in_time:
            raise JobFailed(
                f"rank {self.rank}: this node has not met the others within {2 * timeout_s:g} s; "
                "see the output of its local rank 0"
            )
        if self._environment.node_rank > 0:
            self._lead = self._client.handle(self._nodes[0].supervisor)

    def _fail(self, failure: JobFailed) -> None:
        if self._loop.failure is None:
            self._on_failed(failure)
        self._loop.fail(failure)

    def _fail_by_signal(self, number: int, grace_s: float | None) -> None:
        self._fail(JobFailed(f"the job was stopped by {signal.Signals(number).name}"))

    def _log_failure(self, failure: JobFailed) -> None:
        if not str(failure).startswith(f"rank {self.rank} failed"):
            # Logged at once: torchrun may end this rank before its traceback is out.
            logger.error("rank %d: %s", self.rank, failure)

    def _await_attached(self) -> None:
        is_attached = self._attached.wait(self._config.attach_timeout_s)
        if self._loop.failure is not None:
            raise self._loop.failure
        if not is_attached:
            raise JobFailed(
                f"rank {self.rank}: no supervisor on node {self._node.node_id} within "
                f"{self._config.attach_timeout_s:g} s; local rank 0 starts it: see its output and "
                f"{self._node.log_dir / 'supervisor.log'}"
            )

    def _supervisor_loss(self) -> JobFailed:
        self._supervisor_lost = True
        logs = self._node.log_dir / "supervisor.log"
        return JobFailed(
            f"the supervisor of this node ended, and with it all processes that it owned: it was "
            f"killed (out of memory?) or crashed; see the end of {logs}"
        )

    def _send_last(self, method: str, *args: object) -> None:
        """Makes a call to a supervisor that may have ended already."""
        if self._supervisor_lost:
            return
        with contextlib.suppress(UmbraError):
            self._loop.run(self._supervisor.call(method, *args, timeout_s=2.0), even_if_failed=True)

    def supervisor_call(self, method: str, *args: object, timeout_s: float = 30.0) -> Any:
        """Calls the supervisor of this node.

        Raises:
            JobFailed: the supervisor is gone, or the job is lost.
            UmbraError: as the supervisor raised it.
        """
        try:
            return self._loop.run(self._supervisor.call(method, *args, timeout_s=timeout_s))
        except ConnectionLost as error:
            raise self._supervisor_loss() from error

    def lead_call(self, method: str, *args: object, timeout_s: float = 30.0) -> Any:
        """Calls the supervisor of rank 0's node, which has the pools.

        Raises:
            JobFailed: the job is lost, or this node's supervisor is gone.
            ConnectionLost: another node's supervisor is gone; `raise_if_lost` soon says why.
            UmbraError: as the supervisor raised it.
        """
        if self._lead is self._supervisor:
            return self.supervisor_call(method, *args, timeout_s=timeout_s)
        return self._loop.run(self._lead.call(method, *args, timeout_s=timeout_s))

    def sync(self, message: SyncMessage[Answer]) -> Answer:
        """Sends a rank's message of a weight sync to the lead; see `SyncSession`."""
        # The supervisor's own deadline comes first: its error names the late rank or engine.
        wait_s = message.left_s + 2.0
        answer = self.lead_call("sync", encode(message), timeout_s=wait_s)
        return decode_answer(message, answer)

    def raise_if_lost(self, within_s: float = 0.0) -> None:
        """Raises JobFailed if the job is lost, or is reported lost within `within_s` seconds.

        For a rank that sees only a consequence (a collective broke, an actor does not answer) and
        should name the cause, which the supervisor reports shortly afterwards.
        """
        self._loop.run(asyncio.sleep(within_s))

    def pass_on_signal(self, number: int) -> None:
        """Passes a signal that this rank got to every rank; see `on_signal`. Returns at once.

        Signal handlers call it: a rank that stopped alone would wait in its next collective call
        for ranks that did not get the signal.
        """
        self._was_stopped = True
        self._loop.start(self._pass_on_signal(number))

    async def _pass_on_signal(self, number: int) -> None:
        with contextlib.suppress(UmbraError):  # then no rank is left to be informed
            await self._supervisor.call(
                "pass_on_signal",
                self.rank,
                self._environment.incarnation,  # as it was attached with
                number,
                timeout_s=_PASS_ON_LIMIT_S,
            )

    def spawn(self, spec: ActorSpec, *, node: int | None = None) -> SyncHandle:
        """Starts an actor and waits until it serves. One rank calls it.

        Args:
            node: index of the node that it runs on; by default this rank's. An actor that was
                started by index is found from all nodes, and its name must be unique in the job. It
                ends with the last rank of rank 0's node or of its own.

        Raises:
            RemoteError: the supervisor's ConfigError or ActorDied, with the actor's traceback.
        """
        wait_s = spec.start_timeout_s + spec.grace_s + 10.0
        if node is None:
            ref = self.supervisor_call("spawn", to_wire(spec), timeout_s=wait_s)
        else:
            ref = self.lead_call("spawn", to_wire(spec), node, timeout_s=wait_s)
        return self._sync_handle(ref)

    def actor(self, name: str, timeout_s: float = 60.0) -> SyncHandle:
        """The actor of that name, once it serves. Any rank calls it.

        It is found on this node or rank 0's, and wherever one was started by its node's index.
        """
        return self._sync_handle(self._loop.run(self._resolve(name, timeout_s)))

    def stop(self, name: str, timeout_s: float = 60.0) -> None:
        """Ends an actor for good, and waits until its process and all below it have ended.

        Any rank may call it, for any actor that `actor` finds. Its name is free afterwards. Calls
        in progress end with `ConnectionLost`; later ones raise `ActorDied` while the actor is still
        ending, and then `ActorNotFound`.

        Raises:
            ActorNotFound: there is no actor of that name.
            ActorDied: its process cannot be ended: it hangs in a driver or file system.
            ConfigError: it is an engine of a pool.
            DeadlineExceeded: it has not ended within `timeout_s`; it ends later.
        """
        self.supervisor_call("stop", name, float(timeout_s), timeout_s=timeout_s + 1.0)

    def restart(self, name: str, timeout_s: float = 60.0) -> SyncHandle:
        """Replaces an actor's process, and waits until the next incarnation serves.

        Any rank may call it, for any actor that `actor` finds. The next process has the same
        `ActorSpec`, and the restart policy does not count this as a failure. An actor that is
        already being restarted starts at once, without the rest of its delay. Calls in
        progress end with `ConnectionLost`, except idempotent ones: these and later calls reach
        the next incarnation.

        An engine of a pool gets the current weights with the next sync, as after a crash. While its
        pool sleeps, it may have to wait until the pool wakes.

        Raises:
            ActorNotFound: there is no actor of that name.
            ActorDied: it has ended for good, before or meanwhile.
            ConfigError: it is only a part of an engine.
            DeadlineExceeded: not ready within `timeout_s`; the restart continues.
        """
        ref = self.supervisor_call("restart", name, float(timeout_s), timeout_s=timeout_s + 1.0)
        return self._sync_handle(ref)

    def connect(self, ref: ActorRef) -> SyncHandle:
        """An actor whose reference was received from elsewhere, such as another node."""
        return self._sync_handle(ref)

    def create_pool(self, spec: PoolSpec, *, others_s: float = 0.0) -> Pool:
        """Starts a pool's engines and waits until all have started. One rank calls it.

        `others_s` is the time that other pools which share its memory may take to start first.
        """
        wait_s = others_s + spec.start_timeout_s + 20.0
        self.lead_call("create_pool", to_wire(spec), timeout_s=wait_s)
        return self.pool(spec.name)

    def pool(self, name: str) -> Pool:
        """A pool that a rank has created."""
        return Pool(self.lead_call, name)

    def _sync_handle(self, ref: ActorRef) -> SyncHandle:
        return SyncHandle(self._loop, self._client.handle(ref, self._successor))

    async def _successor(self, lost: ActorRef, timeout_s: float) -> ActorRef:
        return await self._resolve(lost.name, timeout_s, lost.incarnation)

    async def _resolve(self, name: str, timeout_s: float, lost_incarnation: int = 0) -> ActorRef:
        ref = await self._supervisor.call(
            "resolve", name, timeout_s, lost_incarnation, timeout_s=timeout_s + 1.0
        )
        if not isinstance(ref, ActorRef):
            raise ConfigError(f"the supervisor has no address for {name}")
        return ref


def _log_note(text: str) -> None:
    logger.info("%s", text)
