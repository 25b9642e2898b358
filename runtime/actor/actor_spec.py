"""The specification of an actor, and the context of the actor in this process.

An actor is an object of any class, served in a process of its own. Its public methods are callable
from other processes (see `umbra.runtime.rpc.rpc_server` for how each kind of method runs). Three
optional methods belong to its lifetime:

    async __aenter__ / __aexit__   entered before the actor is announced, left at shutdown
    async run()                    runs beside the calls; if it raises, the actor dies with it
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from umbra.runtime.actor.function_queue import FunctionQueue
from umbra.runtime.errors import ConfigError
from umbra.runtime.process.process_end import ExitStatus
from umbra.runtime.rpc.rpc_client import Client, Handle
from umbra.runtime.rpc.rpc_server import idempotent
from umbra.runtime.rpc.wire import ActorRef

__all__ = ["ActorContext", "ActorSpec", "RestartPolicy", "actor_context", "idempotent"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Role = Literal["actor", "engine", "manager", "rollout"]
RestartMode = Literal["never", "on_failure"]

_current: list[ActorContext] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Whether ("on_failure") and when a process is started again: at most `max_restarts` times
    within `window_s` seconds. The first restart waits for `backoff_initial_s`, each later one
    within the window twice as long, at most `backoff_max_s`."""

    mode: RestartMode = "on_failure"
    max_restarts: int = 5
    """More: a process that cannot start is tried for longer before the job fails. Fewer: a job of
    days ends after a handful of crashes within one window."""
    window_s: float = 600.0
    """Longer: rare crashes add up. Shorter than max_restarts backoffs: crash loops go unnoticed."""
    backoff_initial_s: float = 0.1
    """Longer: each recovery waits. Zero: a process that dies at import restarts without pause."""
    backoff_max_s: float = 10.0

    def __post_init__(self) -> None:
        if self.mode not in ("never", "on_failure"):
            raise ConfigError(f"restart mode {self.mode!r}: use never or on_failure")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts}: use 0 or more")
        if self.window_s <= 0:
            raise ConfigError(f"restart window_s is {self.window_s:g}: use more than 0")
        if not 0 <= self.backoff_initial_s <= self.backoff_max_s:
            raise ConfigError(
                f"restart backoff of {self.backoff_initial_s:g} s to {self.backoff_max_s:g} s: "
                "use 0 <= backoff_initial_s <= backoff_max_s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """How to start an actor and what to do when it ends.

    Attributes:
        name: unique on the node; letters, digits, `-`, `_` and `.`.
        target: `module:Class`.
        kwargs: plain values for the constructor, or dataclasses, which become plain values.
        kwarg_settings: the user's setting that an argument comes from, for messages.
        restart: what to do when the process ends.
        essential: its final death fails the job; otherwise only calls to it fail.
        start_timeout_s: from spawn to announced.
        hung_limit_s: a process whose heartbeat thread is silent for this long is killed. A
            short limit kills healthy processes on an overloaded machine.
        busy_limit_s: a process whose loop has not ticked for this long is killed.
        stall_limit_s: an engine whose `progress()` does not change for this long is killed;
            within seconds if one of its processes is stopped. 0: not watched.
        grace_s: from SIGTERM to SIGKILL.
        env: added to the environment.
        sys_path: folders put in front of `sys.path`, for user code.
        memory_limit_nbytes: resident memory at which the process and its descendants are
            killed; 0 means no limit.
        role: the kind of process, for listings and logs.
        frees_main_thread: whether the actor's loop leaves the main thread to the target
            (`ActorContext.main_thread`), because Python handles signals only there.
        gpus: an engine's GPUs, by index or UUID; () on the CPU; None: it may be on any GPU.
    """

    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    kwarg_settings: Mapping[str, str] = field(default_factory=dict[str, str])
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    essential: bool = True
    start_timeout_s: float = 120.0
    hung_limit_s: float = 15.0
    busy_limit_s: float = 300.0
    stall_limit_s: float = 0.0
    grace_s: float = 3.0
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    sys_path: tuple[str, ...] = ()
    memory_limit_nbytes: int = 0
    role: Role = "actor"
    frees_main_thread: bool = False
    gpus: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == "supervisor":
            raise ConfigError(
                f"actor name {self.name!r}: use letters, digits, '-', '_' and '.', beginning with "
                "a letter or digit, and not 'supervisor'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorContext:
    """The name, incarnation and supervisor of the actor running in this process.

    Attributes:
        num_restarts: incarnations that ended before this one. An actor spawned again under an
            old name (after an elastic restart) continues that name's incarnations, but counts
            restarts from 0.
        supervisor: the supervisor of this node.
        main_thread: runs functions on the process's main thread; None if the actor's loop has it.
        tcp_host: this node's address for other nodes; "" in a job that listens on none.
    """

    name: str
    incarnation: int
    num_restarts: int
    node_id: str
    supervisor: Handle
    client: Client
    main_thread: FunctionQueue | None = None
    tcp_host: str = ""

    @property
    def job_folder(self) -> Path:
        """The job's socket directory on this node, removed with the job."""
        return Path(self.supervisor.ref.ipc_endpoint.removeprefix("ipc://")).parent

    def connect(self, ref: ActorRef) -> Handle:
        return self.client.handle(ref, self.successor)

    async def resolve(self, name: str, timeout_s: float, lost_incarnation: int = 0) -> ActorRef:
        """The live incarnation of `name`, once there is one other than `lost_incarnation`. Raises
        ActorNotFound, or ActorDied if it will not be restarted, or DeadlineExceeded."""
        ref = await self.supervisor.call(
            "resolve", name, timeout_s, lost_incarnation, timeout_s=timeout_s + 1.0
        )
        assert isinstance(ref, ActorRef)
        return ref

    async def successor(self, lost: ActorRef, timeout_s: float) -> ActorRef:
        return await self.resolve(lost.name, timeout_s, lost.incarnation)


def actor_context() -> ActorContext:
    """The context of the actor that this process serves; RuntimeError outside an actor."""
    if not _current:
        raise RuntimeError("actor_context() is for code that runs inside an actor's process")
    return _current[0]


def set_actor_context(context: ActorContext) -> None:
    assert not _current, "one actor a process"
    _current.append(context)


def load_target(target: str) -> type:
    """Imports `module:Class`. Raises ConfigError that names the cause."""
    module_name, _, class_name = target.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"actor target {target!r} must be written module:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot import {module_name!r} for actor target {target!r}: {error}. "
            "Install it, or put its folder on PYTHONPATH or in the spec's sys_path."
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"{module_name} ({module.__file__}) has no class {class_name!r}")
    return found


def make_target(
    target: str, kwargs: Mapping[str, Any], kwarg_settings: Mapping[str, str] | None = None
) -> Any:
    """An instance of `module:Class`. Raises ConfigError that lists the accepted arguments, and
    names the setting of a wrong one if `kwarg_settings` has it."""
    kind = load_target(target)
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a class without a signature, such as one written in C
        return kind(**kwargs)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        settings = (kwarg_settings or {}).items()
        setting = next((f"{text}: " for name, text in settings if repr(name) in str(error)), "")
        raise ConfigError(
            f"{setting}{target}: {error}; it takes {', '.join(signature.parameters)}"
        ) from None
    return kind(**kwargs)


@dataclass(frozen=True, slots=True)
class ScheduleRestart:
    delay_s: float


@dataclass(frozen=True, slots=True)
class DeclareFailed:
    reason: str


class RestartTracker:
    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.num_restarts = 0
        """Over the whole lifetime, for statistics."""
        self._restarts_at: deque[float] = deque()  # Ascending, within the window.

    def observe(self, status: ExitStatus, now: float) -> ScheduleRestart | DeclareFailed:
        """Decides after an end at monotonic time `now` that umbra did not request."""
        policy = self.policy
        if policy.mode == "never":
            return DeclareFailed(str(status))
        while self._restarts_at and now - self._restarts_at[0] >= policy.window_s:
            self._restarts_at.popleft()
        num_recent = len(self._restarts_at)
        if num_recent >= policy.max_restarts:
            return DeclareFailed(
                f"{status}, after {num_recent} restarts within {policy.window_s:g} s "
                f"(allowed: {policy.max_restarts})"
            )
        self._restarts_at.append(now)
        self.num_restarts += 1
        # Exponents are bounded: 2.0**1024 overflows, and any backoff is at its maximum long before.
        return ScheduleRestart(
            min(policy.backoff_initial_s * 2.0 ** min(num_recent, 60), policy.backoff_max_s)
        )
