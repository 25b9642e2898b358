"""Findings about a hanging job, in words: who is stopped, who waits for whom. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from umbra.runtime.reports.job_state import JobState, name_ranks
from umbra.runtime.reports.process_report import SeenProcess, SeenThread, is_of_user

_USER_CALLS: Final = ("answers score(", "answers run_agent(")
"""Calls that a rollout worker answers by running user code."""
_USER_THREADS: Final = ("MainThread", "user-code-functions", "user-code-loop")
"""Threads of a rollout worker that run it."""
_SOON_S: Final = 1.0
"""Calls of user code that are younger explain nothing."""
_IN_UMBRA: Final = "/umbra/runtime/"
"""Path of the frame in which a rank's main thread waits for umbra."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    name: str  # as people know it; "" if the job has no other
    processes: Sequence[SeenProcess]  # none if it did not answer
    calls: Mapping[str, Mapping[str, Any]]  # by process, from `pending_calls`; else "problem"

    def label(self, process: SeenProcess) -> str:
        where = f" on {self.name}" if self.name else ""
        return f"{process.name} (pid {process.pid}{where})"


def verdicts(nodes: Sequence[SeenNode], state: JobState | None) -> list[str]:
    """Sentences, the most telling first. `state` is None if the supervisor does not answer."""
    lines = [f"{node.name} does not answer" for node in nodes if not node.processes]
    lines += [line for node in nodes for line in _stuck(node)]
    lines += [line for node in nodes for line in _user_code(node)]
    lines += [line for node in nodes for line in _silent(node)]
    lines += _ranks(nodes)
    return [*lines, state.phase] if state is not None else lines


def _stuck(node: SeenNode) -> Iterable[str]:
    for process in node.processes:
        if process.why_stuck and process.why_stuck != "ended":
            remedy = f": kill -CONT {process.pid} lets it continue" * process.is_stopped
            yield f"{node.label(process)} is {process.why_stuck}{remedy}"


def _user_code(node: SeenNode) -> Iterable[str]:
    """Rollout workers that have been in user code for a while."""
    for process in node.processes:
        described = node.calls.get(process.name, {"calls": [], "tasks": []})
        ages_s = [age_s for age_s, label in described["calls"] if label.startswith(_USER_CALLS)]
        if ages_s and max(ages_s) > _SOON_S and not process.why_stuck:
            place = _user_place(process.threads, described["tasks"])
            where = f"is in {place}" if place else "runs user code"
            yield f"{node.label(process)} {where}; its oldest call began {max(ages_s):.0f} s ago"


def _user_place(threads: Iterable[SeenThread], tasks: Iterable[str]) -> str:
    """The code that a thread runs, or that most asynchronous calls wait in; "" if unknown."""
    for thread in threads:
        if thread.user_place and thread.name in _USER_THREADS:
            return thread.user_place
    chains = [[place for place in task.split(" > ") if is_of_user(place)] for task in tasks]
    innermost = Counter(chain[-1] for chain in chains if chain)
    return innermost.most_common(1)[0][0] if innermost else ""


def _silent(node: SeenNode) -> Iterable[str]:
    """Processes that answer no calls, though they are not stopped."""
    for process in node.processes:
        if node.calls.get(process.name, {}).get("problem") and not process.why_stuck:
            serving = _thread(process, "actor") or _thread(process, "MainThread")
            where = serving.user_place or serving.places[0] if serving else ""
            why = f"it is in {where}" if where else process.problem or "its threads wait"
            yield f"{node.label(process)} does not answer: {why}"


def _ranks(nodes: Sequence[SeenNode]) -> list[str]:
    """Where the ranks are that others wait for, if some wait and others do not."""
    waiting: list[int] = []
    are_some_in_calls = False
    elsewhere: list[str] = []
    for node in nodes:
        for process in node.processes:
            main = _thread(process, "MainThread")
            if process.rank is None or main is None:
                continue
            if main.is_in_collective:
                waiting.append(process.rank)
            elif _IN_UMBRA in main.places[0]:
                are_some_in_calls = True
            else:
                elsewhere.append(f"{node.label(process)} is in {main.user_place or main.places[0]}")
    lines = elsewhere if waiting or are_some_in_calls else []
    if waiting:
        lines.append(f"{name_ranks(waiting)} wait{'s' * (len(waiting) == 1)} in a collective")
    return lines


def _thread(process: SeenProcess, name: str) -> SeenThread | None:
    return next((thread for thread in process.threads if thread.name == name), None)
