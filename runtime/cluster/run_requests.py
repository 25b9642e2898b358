from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

from umbra.runtime.disk import replacing
from umbra.runtime.errors import ActorNotFound, ConfigError
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import Seconds, Settings, from_wire, to_wire

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 1.0
"""Interval of looks for a request. A longer one delays the stop; each asks the file system."""

T = TypeVar("T")

PREEMPT_SIGNAL: Final = signal.SIGUSR1
"""Stands for a preemption wherever a stop signal's number is passed on."""
PREEMPTED_STATUS: Final = 75
"""Exit status of a preempted rank: EX_TEMPFAIL of sysexits.h, which asks for another try."""

NOTHING_TO_SAVE: Final = "before the first step; nothing was saved"
"""Part of the failure of a rank that a stop signal ended while it started. `umbra stop` looks for
it, because nothing is lost then."""


class JobRequests:
    """Requests to the job in a run directory, by a call or a file. A supervisor with ranks owns it.

    The lead makes itself known in the directory, and looks there. The directory may be on a shared
    file system that answers late, so threads use it; writes come one after the other. `act_on` is
    called with each request to this job, and raises ActorNotFound if it cannot.
    """

    def __init__(self, run_dir: Path, act_on: Callable[[JobRequest], None]) -> None:
        self.is_lead = False
        self._notice = RunNotice(run_dir)
        self._address: SupervisorAddress | None = None  # the last one posted
        self._act_on = act_on
        self._order = asyncio.Lock()

    async def post(self, address: SupervisorAddress) -> None:
        """Makes this supervisor known as the lead. A request to the same job stays."""
        self.is_lead = True
        async with self._order:
            self._address = address
            await asyncio.to_thread(self._notice.post, address)

    async def mark_preempted(self) -> None:
        async with self._order:
            await asyncio.to_thread(self._notice.mark_preempted)

    async def withdraw(self) -> None:
        """Called when the job is over here. The address stays if another node has posted one."""
        async with self._order:
            if self._address is not None:
                await asyncio.to_thread(self._notice.withdraw, self._address)

    async def look(self) -> None:
        """Takes requests from clients that cannot reach the supervisor's socket, until cancelled.
        Must not be cancelled before the job is over: a request just taken would be lost."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            if not self.is_lead:
                continue
            try:
                request = await asyncio.to_thread(self._notice.take_request)
                if request is not None:
                    answer = JobAnswer(token=request.token, refusal=self._try(request))
                    await asyncio.to_thread(self._notice.answer, answer)
            except OSError as error:
                logger.warning("cannot take a request from the run directory: %s", error)

    def _try(self, request: JobRequest) -> str:
        try:
            self._act_on(request)
        except ActorNotFound as error:
            return str(error)
        return ""


def supervisor_ref(node_id: str, socket_dir: Path) -> ActorRef:
    """Where the supervisor of a socket directory listens: known before it runs."""
    endpoint = f"ipc://{socket_dir / 'supervisor'}"
    return ActorRef(name="supervisor", incarnation=1, node_id=node_id, ipc_endpoint=endpoint)


def stop_status(number: int) -> int:
    return PREEMPTED_STATUS if number == PREEMPT_SIGNAL else 128 + number


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorAddress:
    """The address of a job's supervisor.

        RUN_DIR/supervisor.json    where the job's supervisor listens; exists while it serves
        RUN_DIR/request.json       a request to it, from where its socket cannot be reached
        RUN_DIR/answer.json        its answer, until the client has read it
        RUN_DIR/preempted          exists if the last job was preempted, or ended because it lost a
                                   node: its launcher starts it again

    A launcher reads `preempted`, because torchrun turns every exit status of a rank into 1.

    Attributes:
        job: a random name that no other job has. It stays when torchrun restarts the ranks.
        node_id: the supervisor's host.
        socket_dir: its folder of sockets, which other hosts and containers do not see.
        tcp_endpoint: its endpoint for other hosts; "" for none.
        secret_file: path of the job's keys, which other hosts need; "" for none.
        has_trace: whether the job's processes record a trace.
    """

    job: str
    node_id: str
    pid: int
    socket_dir: str
    tcp_endpoint: str = ""
    secret_file: str = ""
    has_trace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest(Settings):
    """Asks `job` to end, one of its nodes to leave, or for a bundle about its state.

    Attributes:
        kind: "stop" acts like SIGTERM; after "preempt" the launcher starts the job again. After
            "drain" a node that only generates leaves; for "dump" see
            `umbra.runtime.reports.hang_bundle`.
        grace_s: time for the step in progress and its checkpoint.
        node: the number or id of the node that leaves.
        bundle: the name of the bundle's file.
        token: of this request alone.
    """

    job: str
    kind: Literal["stop", "preempt", "drain", "dump"]
    grace_s: Seconds = 300.0
    node: str = ""
    bundle: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def asker(self) -> str:
        return f"umbra {self.kind}"

    @property
    def number(self) -> int:
        return PREEMPT_SIGNAL if self.kind == "preempt" else signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """Acknowledges the `JobRequest` of that token; `refusal` is the reason against it, or ""."""

    token: str
    refusal: str


class RunNotice:
    """The files of a run directory by which a job is found and gets requests. The job's supervisor
    writes all of them but the request."""

    def __init__(self, run_dir: Path) -> None:
        self._address = run_dir / "supervisor.json"
        self._request = run_dir / "request.json"
        self._answer = run_dir / "answer.json"
        self._preempted = run_dir / "preempted"
        self._lock = run_dir / ".lock"

    def post(self, address: SupervisorAddress) -> None:
        """Makes the supervisor known. Removes files that concern an earlier job."""
        try:
            with contextlib.suppress(ConfigError):  # `take_request` logs and removes it
                request = _read(JobRequest, self._request)
                if request is not None and request.job != address.job:
                    self._request.unlink(missing_ok=True)
            self._preempted.unlink(missing_ok=True)
            _write(self._address, address)
        except OSError as error:  # the job needs none of them
            logger.warning("cannot write %s: %s", self._address, error)

    def withdraw(self, address: SupervisorAddress) -> None:
        with contextlib.suppress(OSError, ConfigError):
            if self.address() == address:
                self._address.unlink(missing_ok=True)

    def take_request(self) -> JobRequest | None:
        """The request that was left, once. A malformed one is logged and removed."""
        try:
            request = _read(JobRequest, self._request)
            self._request.unlink(missing_ok=True)
        except ConfigError as error:
            logger.warning("%s is ignored: %s", self._request, error)
            self._request.unlink(missing_ok=True)
            return None
        return request

    def leave_request(self, request: JobRequest) -> None:
        _write(self._request, request)

    def answer(self, answer: JobAnswer) -> None:
        _write(self._answer, answer)

    def take_answer(self, request: JobRequest) -> JobAnswer | None:
        answer = _read(JobAnswer, self._answer)
        if answer is None or answer.token != request.token:
            return None
        self._answer.unlink(missing_ok=True)
        return answer

    def mark_preempted(self) -> None:
        try:
            self._preempted.touch()
        except OSError as error:
            logger.warning("cannot write %s: %s", self._preempted, error)

    def address(self) -> SupervisorAddress | None:
        """The running job's supervisor, or None. A killed supervisor leaves its address behind."""
        return _read(SupervisorAddress, self._address)

    @property
    def is_preempted(self) -> bool:
        return self._preempted.exists()

    @property
    def is_locked(self) -> bool:
        """Whether rank 0 of a run uses the directory."""
        with contextlib.suppress(OSError), self._lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


def _write(path: Path, value: object) -> None:
    with replacing(path) as file:
        file.write(json.dumps(to_wire(value)).encode())


def _read(kind: type[T], path: Path) -> T | None:
    """None if there is no such file. Raises ConfigError if it is malformed, OSError."""
    try:
        return from_wire(kind, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ConfigError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"cannot read {path}, which another version of umbra may have written: use the one "
            f"that runs the job ({error})"
        ) from error
