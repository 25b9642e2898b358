"""The nodes of a job, and how they find each other: through the ranks' store.

    node 0   makes a file in the run directory ─▶ its name ─┐
    others   look for that file there; if it is missing, the directory is not shared
    all      their own addresses ─▶ the store ─▶ all
    a node that fails before this   its error in place of its address ─▶ the store ─▶ all

The store is plain text and admits everybody, so it carries addresses and errors only, never keys.

If the nodes may change, they meet after each start of the ranks, in a store of this start alone,
which has no earlier addresses. The supervisors, which live on, number the meetings by epochs: each
node brings the last epoch of its supervisor, and the new one is the largest of these plus one.
Links refuse joins and reports of an earlier epoch. Epochs replace torchrun's count of restarts,
which differs between nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from umbra.runtime.cluster.environment import TorchrunEnvironment, host_address, slurm_job_id
from umbra.runtime.errors import ConfigError, JobFailed
from umbra.runtime.rpc.curve_keys import CurveKeys
from umbra.runtime.rpc.loop_socket import split_endpoint
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import from_wire, to_wire

_SHARED_FILE: Final = "shared-file"
_SHARED_LIMIT_S: Final = 10.0
"""A file that node 0 made may take so long to appear elsewhere: NFS caches folders for seconds."""
_LOOK_INTERVAL_S: Final = 0.1
_MAX_FAILURE_LEN: Final = 500
"""A failed node's error is cut here. A longer text fills the output of all other nodes."""
_REPORT_LIMIT_S: Final = 10.0
"""Time for reporting a failure. With less, slow nodes miss it; with more, nodes end later where one
does not come, or where torchrun's store has ended."""


class Store(Protocol):
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNode:
    """A node as the others see it.

    Attributes:
        num_ranks: of the trainer; 0 on a node that only generates.
        gpus, gpu_nbytes: as CUDA_VISIBLE_DEVICES names them; sizes are empty without NVML.
        tcp_endpoint: its supervisor's; "" in a job of one node.
        problem: why this node cannot take part, or "".
        failure: the error by which it failed before it met the others, or "".
        epoch: the last one that its supervisor took part in; 0 for none.
        job: the name by which requests addressed the job in that epoch (`SupervisorAddress`).
    """

    node_id: str
    num_ranks: int
    gpus: tuple[str, ...] = ()
    gpu_nbytes: tuple[int, ...] = ()
    tcp_endpoint: str = ""
    key_digest: str = ""
    problem: str = ""
    failure: str = ""
    epoch: int = 0
    job: str = ""
    choices: Mapping[str, str | bool] = field(default_factory=dict[str, str | bool])

    @property
    def address(self) -> str:
        return split_endpoint(self.tcp_endpoint)[0]

    @property
    def supervisor(self) -> ActorRef:
        return ActorRef(
            name="supervisor",
            incarnation=1,
            node_id=self.node_id,
            ipc_endpoint="",
            tcp_endpoint=self.tcp_endpoint,
        )


def ranks_of(nodes: Sequence[JobNode], node: int) -> range:
    first = sum(other.num_ranks for other in nodes[:node])
    return range(first, first + nodes[node].num_ranks)


def check_several_nodes(environment: TorchrunEnvironment) -> None:
    """Raises ConfigError if torchrun's options do not suit a job of several nodes."""
    if environment.run_id in ("", "none"):
        raise ConfigError(
            "a job of several nodes needs a name: start torchrun with --rdzv-id NAME, the same on "
            "all nodes"
        )
    if (environment.incarnation > 1 or environment.may_restart) and not environment.has_own_store:
        raise ConfigError(
            "torchrun restarts failed ranks (--max-restarts), and the ranks of several nodes would "
            "look for its store where it was before: start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment on all nodes, or with "
            "--max-restarts 0"
        )


def next_epoch(nodes: Sequence[JobNode]) -> int:
    """The next epoch: one more than any of these nodes has seen."""
    return 1 + max(node.epoch for node in nodes)


def request_name(nodes: Sequence[JobNode]) -> str:
    return max(nodes, key=lambda node: node.epoch).job


def job_name(environment: TorchrunEnvironment) -> str:
    return "-".join(filter(None, (environment.run_id, slurm_job_id())))


def own_address(host: str, port: int) -> str:
    """The user's address for this host, or the one from which it reaches rank 0's host."""
    if chosen := host_address():
        return chosen
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # UDP: connecting sends nothing
            probe.connect(address)
            name: str = probe.getsockname()[0]
            return name
    except OSError as error:
        raise ConfigError(
            f"no address of this host reaches {host}, the host of rank 0 ({error}): set "
            "UMBRA_HOST_ADDRESS to the one that the other nodes can reach"
        ) from error


def key_digest(keys: CurveKeys) -> str:
    """Distinguishes keys without revealing them."""
    return hashlib.sha256(keys.public + keys.secret).hexdigest()[:16]


def meet_nodes(
    environment: TorchrunEnvironment, me: JobNode, run_dir: Path, timeout_s: float
) -> tuple[JobNode, ...]:
    """All nodes of the job by rank, for local rank 0 of each. Raises ConfigError if they do
    not share the run directory or the keys, or cannot connect; JobFailed if one has failed
    or is missing."""
    deadline = time.monotonic() + timeout_s
    missing = "the others"
    try:
        store = open_job_store(environment, timeout_s)
        with _shared_file(store, environment.node_rank, run_dir) as problem:
            store.set(_key(environment.node_rank), _encode(replace(me, problem=problem)))
            nodes: list[JobNode] = []
            for rank in range(environment.num_nodes):
                left_s, missing = max(0.0, deadline - time.monotonic()), f"node {rank}"
                store.wait([_key(rank)], timedelta(seconds=left_s))
                node = from_wire(JobNode, json.loads(store.get(_key(rank))))
                if node.failure:
                    failure = node.failure[:_MAX_FAILURE_LEN]
                    raise JobFailed(f"node {rank} ({node.node_id}) failed: {failure}")
                nodes.append(node)
            # Node 0 removes the file once all have looked for it.
    except RuntimeError as error:  # torch.distributed.DistError and its timeouts
        raise JobFailed(
            f"node {environment.node_rank} did not meet {missing} of {environment.num_nodes} nodes "
            f"within {timeout_s:g} s: see the output there ({str(error).splitlines()[0]})"
        ) from error
    check_nodes(nodes)
    return tuple(nodes)


@contextlib.contextmanager
def failure_reported(environment: TorchrunEnvironment) -> Generator[None]:
    """Reports an error of the block to the nodes that wait in `meet_nodes`, now or soon."""
    try:
        yield
    except Exception as error:
        if environment.spans_nodes and environment.local_rank == 0:
            _report_failure(environment, f"{type(error).__name__}: {error}")
        raise


def _report_failure(environment: TorchrunEnvironment, failure: str) -> None:
    me = JobNode(
        node_id=socket.gethostname(),
        num_ranks=environment.local_world_size,
        failure=failure,
    )
    with contextlib.suppress(RuntimeError):  # no store: torchrun has ended on node 0
        store = open_job_store(environment, _REPORT_LIMIT_S)
        store.compare_set(_key(environment.node_rank), "", _encode(me))
        if environment.node_rank == 0:
            store.compare_set(_SHARED_FILE, "", ".")  # others look for no file
        _stay_for_others(store, environment)


def _stay_for_others(store: Store, environment: TorchrunEnvironment) -> None:
    """Waits for all nodes, which need the keys and the store that end with this node."""
    keys = [_key(rank) for rank in range(environment.num_nodes)]
    with contextlib.suppress(RuntimeError):  # one does not come in time
        store.wait(keys, timedelta(seconds=_REPORT_LIMIT_S))


_own_stores: Final[list[object]] = []
"""Holds the ranks' store until this process ends."""


def _key(node_rank: int) -> str:
    return f"node-{node_rank}"


def _encode(node: JobNode) -> str:
    return json.dumps(to_wire(node))


def open_job_store(environment: TorchrunEnvironment, timeout_s: float) -> Store:
    """The ranks' store, for any rank, before and besides `meet_nodes`."""
    import torch.distributed

    dist: Any = torch.distributed
    host, port = environment.meeting_point
    is_here = environment.has_own_store and environment.rank == 0
    store = dist.TCPStore(
        host,
        port,
        is_master=is_here,
        timeout=timedelta(seconds=timeout_s),
        multi_tenant=is_here,  # torch.distributed takes this store later
    )
    if is_here:
        _own_stores.append(store)
    opened: Store = dist.PrefixStore("umbra-nodes", store)
    return opened


@contextlib.contextmanager
def _shared_file(store: Store, node_rank: int, run_dir: Path) -> Generator[str]:
    """Yields why this node does not share node 0's run directory, or ""."""
    if node_rank == 0:
        path = run_dir / f".shared-{secrets.token_hex(8)}"
        run_dir.mkdir(parents=True, exist_ok=True)
        path.touch()
        try:
            store.set(_SHARED_FILE, path.name)
            yield ""
        finally:
            path.unlink()
        return
    path = run_dir / store.get(_SHARED_FILE).decode()
    deadline = time.monotonic() + _SHARED_LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            yield (
                f"run.dir = {run_dir.absolute()} is not the same directory there as on node 0: put "
                "it on a file system that all nodes share"
            )
            return
        time.sleep(_LOOK_INTERVAL_S)
    yield ""


def check_nodes(nodes: Sequence[JobNode]) -> None:
    """Raises ConfigError if they cannot be the nodes of one job."""
    for rank, node in enumerate(nodes):
        if node.problem:
            raise ConfigError(f"node {rank} ({node.node_id}): {node.problem}")
        if node.key_digest != nodes[0].key_digest:
            raise ConfigError(
                f"node {rank} ({node.node_id}) has other keys than node 0: the nodes share no home "
                "directory, so make a file of keys by `python -m umbra.runtime.rpc.curve_keys "
                "FILE`, copy it to all nodes, and name it in UMBRA_SECRET_FILE"
            )
    if len({node.node_id for node in nodes}) < len(nodes):
        raise ConfigError(f"two nodes have the same id: {[node.node_id for node in nodes]}")
    local = [node.tcp_endpoint.startswith(("tcp://127.", "tcp://[::1]")) for node in nodes]
    if any(local) and not all(local):
        raise ConfigError(
            f"node {local.index(True)} is known by the address of its own loopback only: set "
            "UMBRA_HOST_ADDRESS there to the one that the other nodes can reach"
        )
