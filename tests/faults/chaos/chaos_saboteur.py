"""Disturbs processes as planned, from outside the run, and records the effects."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from chaos_plan import POOL, Fault, FaultKind, Phase, Role
from chaos_victim import Victim

from umbra.runtime.actor.supervised_actor import ActorState
from umbra.runtime.engine_api.lifecycle import EngineState
from umbra.runtime.errors import UmbraError
from umbra.runtime.session.session import Session

_POLL_S: Final = 0.02
"""Interval of asking for the run's progress, and for an engine that can be hit."""
_AIM_TIMEOUT_S: Final = 60.0
_SIGNAL_TIMEOUT_S: Final = 10.0
"""Deadline for the kernel to end or stop a process: busy machines take long."""
_MAX_AT_ONCE: Final = 8

_DEATH: Final = re.compile(r"(?P<label>\S+#\d+) (?P<how>.+); restarting it in ")
_ANY: Final = frozenset({*EngineState, *ActorState})
_AT_WORK: Final = frozenset({EngineState.SERVING, ActorState.RUNNING})
_IN_UPDATE: Final = frozenset(
    {EngineState.PAUSED, EngineState.UPDATING, EngineState.PENDING_WEIGHTS}
)
"""States of an engine in its lifecycle, and of any other process under its supervisor."""


class ChaosError(UmbraError):
    """The run could not be carried out as planned; the message has what it waited for."""


class DeathNotes:
    """How each incarnation of a process ended, as reported by the supervisor."""

    def __init__(self) -> None:
        self.how: dict[str, str] = {}

    def observe(self, text: str) -> None:
        """Reads one note; callable from any thread."""
        found = _DEATH.match(text)
        if found:
            self.how[found["label"]] = found["how"]

    @property
    def num_hung(self) -> int:
        return sum("no heartbeat" in how for how in self.how.values())

    def crashes(self) -> list[str]:
        """Ends of processes that nobody killed."""
        explained = ("SIGKILL", " was killed: ", "not ready within")
        return [
            f"{label} {how}"
            for label, how in self.how.items()
            if not any(sign in f" {how}" for sign in explained)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that happened.

    Attributes:
        label: the incarnation of the process that it hit.
        state: an engine's in its lifecycle; any other process's under its supervisor.
    """

    kind: FaultKind
    role: Role
    label: str
    state: str


class _Aim(NamedTuple):
    """An incarnation that may be hit, and its state."""

    role: Role
    label: str
    pid: int
    state: str


class Saboteur:
    """Carries out faults while its block runs. Owns its threads.

    Args:
        victims: roles of the actors that may be hit, by name.
        faults: from `ChaosPlan.faults`.
        num_finished: returns the number of finished trajectories; called from another thread.

    Attributes:
        strikes: faults that had an effect: the killed process ended, or the stopped one stopped.
        continued: the incarnations that continued after a pause.
    """

    def __init__(
        self,
        session: Session,
        victims: Mapping[str, Role],
        faults: Sequence[Fault],
        rng: random.Random,
        num_finished: Callable[[], int],
    ) -> None:
        self.strikes: list[Strike] = []
        self.continued: list[str] = []
        self._session = session
        self._victims = dict(victims)
        self._by_progress = [fault for fault in faults if fault.phase == "generation"]
        self._by_step: dict[tuple[Phase, int], list[Fault]] = {}
        for fault in faults:
            if fault.phase != "generation":
                self._by_step.setdefault((fault.phase, fault.step), []).append(fault)
        self._rng = rng
        self._num_finished = num_finished
        self._is_over = threading.Event()
        self._hitting = threading.Lock()  # so that an end or a stop is counted only once
        self._executor = ThreadPoolExecutor(1 + _MAX_AT_ONCE, "saboteur")
        self._futures: list[Future[None]] = []

    def __enter__(self) -> Self:
        self._futures.append(self._executor.submit(self._follow_progress))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises the error of a thread, if there is no other."""
        self._is_over.set()
        self._executor.shutdown(cancel_futures=error is not None)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raises the first error of a thread so far."""
        for future in list(self._futures):
            if future.done():
                future.result()

    def finish(self) -> None:
        """Waits until every fault has happened; called when all batches are complete."""
        for future in self._futures:  # grows meanwhile: the first one submits the others
            future.result()

    @contextmanager
    def during(self, phase: Phase, step: int) -> Generator[None]:
        """Applies the faults of a step's training or weight update during the block."""
        is_under_way = threading.Event()
        is_under_way.set()
        for fault in self._by_step.pop((phase, step), []):
            task = self._executor.submit(self._strike_during, fault, is_under_way)
            self._futures.append(task)
        try:
            yield
        finally:
            is_under_way.clear()

    # -- in its threads ------------------------------------------------------------------

    def _follow_progress(self) -> None:
        for fault in self._by_progress:
            while self._num_finished() < fault.after_finished:
                if self._is_over.wait(_POLL_S):
                    return
            self._futures.append(self._executor.submit(self._strike, fault))

    def _strike_during(self, fault: Fault, is_under_way: threading.Event) -> None:
        """Hits a victim during the block, or afterwards if the block was too short."""
        self._is_over.wait(fault.delay_s)
        is_updated = fault.phase == "update" and fault.role == "engine"
        states = _IN_UPDATE if is_updated else _AT_WORK
        while is_under_way.is_set():
            if self._try_to_strike(fault, states):
                return
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        deadline = time.monotonic() + _AIM_TIMEOUT_S
        while not self._is_over.is_set():
            if time.monotonic() > deadline:
                raise ChaosError(f"{fault} found no victim for {_AIM_TIMEOUT_S:g} s")
            if self._try_to_strike(fault, _ANY if fault.hits_any else _AT_WORK):
                return
            self._is_over.wait(_POLL_S)

    def _try_to_strike(self, fault: Fault, states: Collection[str]) -> bool:
        """Hits a victim of the fault's role in one of these states, unless it has ended or is
        stopped already."""
        fit = [aim for aim in self._aims() if aim.role == fault.role and aim.state in states]
        if not fit:
            return False
        aim = self._rng.choice(fit)
        is_hit = False
        try:
            with Victim(aim.label, aim.pid) as victim:
                with self._hitting:
                    is_hit = self._hit(fault, victim)
                if is_hit:
                    self.strikes.append(
                        Strike(kind=fault.kind, role=aim.role, label=aim.label, state=aim.state)
                    )
                if is_hit and fault.kind == "pause":
                    self._is_over.wait(fault.lasts_s)
                    victim.send(signal.SIGCONT)
                    self.continued.append(aim.label)
        except ProcessLookupError:
            pass  # it ended before it was hit, or while it was stopped
        return is_hit

    def _aims(self) -> list[_Aim]:
        """The current states of all victims."""
        engines: list[dict[str, Any]] = self._session.supervisor_call("pool_states", POOL)
        states = {row["engine"]: str(row["state"]) for row in engines}
        actors: list[dict[str, Any]] = self._session.supervisor_call("list_actors")
        return [
            _Aim(
                role=self._victims[row["name"]],
                label=f"{row['name']}#{row['incarnation']}",
                pid=int(row["pid"]),
                state=states.get(row["name"], str(row["state"])),
            )
            for row in actors
            if row["name"] in self._victims
        ]

    def _hit(self, fault: Fault, victim: Victim) -> bool:
        """Sends the signal; returns whether it had its effect, according to the kernel."""
        if victim.has_ended():
            return False
        if fault.kind == "kill":
            victim.send(signal.SIGKILL)
            return victim.has_ended(_SIGNAL_TIMEOUT_S)
        if victim.is_stopped():
            return False
        victim.send(signal.SIGSTOP)
        return victim.is_stopped(_SIGNAL_TIMEOUT_S)

    # -- afterwards ----------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Counts of faults by kind, role and state of the victim."""
        kinds = Counter(strike.kind for strike in self.strikes)
        return {
            "kills": len(self.strikes),
            "sigkills": kinds["kill"],
            "stops": kinds["stop"],
            "pauses": kinds["pause"],
            "pauses_continued": len(self.continued),
            "kills_by_role": dict(Counter(strike.role for strike in self.strikes)),
            "kills_by_state": dict(Counter(strike.state for strike in self.strikes)),
        }

    def fatal_labels(self) -> set[str]:
        """Incarnations that cannot have continued."""
        return {strike.label for strike in self.strikes if strike.kind != "pause"}
