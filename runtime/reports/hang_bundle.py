"""The state of all processes of a job in one file, for a person who wonders why it hangs.

    who asks ──▶ lead: every node's report, and the state of the job ──▶ RUN_DIR/bundles/NAME.tar
                  └▶ supervisors of the other nodes: their report

The file has a `summary.txt`, which begins with the findings (`verdicts`), and for each
node a folder with stacks, calls and logs. Nothing is stopped or killed; processes that do not
answer are named.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import tarfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from umbra.runtime.actor.node_actors import NodeActors
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.disk import replacing
from umbra.runtime.errors import UmbraError
from umbra.runtime.reports.job_state import EngineStatus, JobState, name_ranks
from umbra.runtime.reports.process_report import (
    SeenProcess,
    SeenThread,
    is_of_user,
    report_processes,
)
from umbra.runtime.rpc.rpc_client import DESCRIBE
from umbra.runtime.rpc.wire import ActorRef
from umbra.runtime.settings import from_wire

logger = logging.getLogger(__name__)

_BUNDLE_LIMIT_S: Final = 18.0
"""Deadline of a bundle: the ranks wait for it."""
_SAME_HANG_S: Final = 60.0
"""Deadlines that are missed within this time share a bundle. Longer: a second hang gets none.
Shorter: each late rank writes its own."""
_CALLS_LIMIT_S: Final = 3.0
"""Deadline of an actor's calls. A blocked one does not answer, and its stacks show why."""
_NODE_LIMIT_S: Final = 6.0
"""Deadline of another node's report: longer than `_CALLS_LIMIT_S`, and shorter than the silence of
a lost node, after which the job may end."""
_NUM_LINES: Final = 8
"""Calls of an actor in the summary, the oldest first. The other files have all."""
_NUM_VERDICTS: Final = 5
"""Findings repeated by an error about a missed deadline; the summary has all."""
_OWN_CALLS: Final = (DESCRIBE, ".stats")
"""Calls that the report itself has made."""
_WAITING: Final = "waiting.txt"
_CALLS: Final = "calls.json"
_PROCESSES: Final = "processes.json"

Files = Mapping[str, str]
_USER_CALLS: Final = ("answers score(", "answers run_agent(")
"""Calls that a rollout worker answers by running user code."""
_USER_THREADS: Final = ("MainThread", "user-code-functions", "user-code-loop")
"""Threads of a rollout worker that run it."""
_SOON_S: Final = 1.0
"""Calls of user code that are younger explain nothing."""
_IN_UMBRA: Final = "/umbra/runtime/"
"""Path of the frame in which a rank's main thread waits for umbra."""


class JobBundles:
    """The bundles of one job. Owned by the supervisor; a node without ranks has no `run_dir`."""

    def __init__(
        self,
        run_dir: Path | None,
        context: NodeContext,
        actors: NodeActors,
        state: Callable[[], Awaitable[JobState]],
    ) -> None:
        self._run_dir = run_dir
        self._context = context
        self._actors = actors
        self._state = state
        self._writing: asyncio.Task[str] | None = None  # the last one about a missed deadline
        self._begun_at = 0.0

    async def report_node(self) -> Files:
        """The state of this node's processes."""
        roots = {f"rank {rank.rank}": rank.pid for rank in self._context.ranks.all()}
        roots |= {"supervisor": os.getpid(), "guardian": os.getppid()}
        node, refs = self._context.node, {"supervisor": self._context.node.supervisor}
        for actor in self._actors.own():
            if actor.has_process:
                roots[actor.spec.name] = actor.pid
                if actor.ref is not None and actor.state == "RUNNING":
                    refs[actor.spec.name] = actor.ref
        reading = asyncio.to_thread(report_processes, roots, node.log_dir)
        files, *described = await asyncio.gather(
            reading, *(self._describe_calls(ref) for ref in refs.values())
        )
        assert isinstance(files, dict)
        calls = dict(zip(refs, described, strict=True))
        return {
            **files,
            _WAITING: "\n".join(
                line for name, found in calls.items() for line in _call_lines(name, found)
            ),
            _CALLS: json.dumps(calls, indent=1),
            "actors.json": json.dumps(self._actors.describe(), indent=2),
        }

    async def _describe_calls(self, ref: ActorRef) -> dict[str, Any]:
        try:
            found: dict[str, Any] = await self._context.client.handle(ref).call(
                DESCRIBE, timeout_s=_CALLS_LIMIT_S
            )
        except UmbraError:
            problem = f"it did not answer within {_CALLS_LIMIT_S:g} s"
            return {"calls": [], "tasks": [], "problem": problem}
        return found

    async def late(self, why: str) -> str:
        """Writes a bundle, once for all that miss a deadline together, also if the caller is gone
        by then. Returns lines for the error's end, with findings and path; "" if there is no
        bundle."""
        now = time.monotonic()
        if self._writing is None or now - self._begun_at > _SAME_HANG_S:
            self._writing = self._context.tasks.create_task(self._write_late(why), name="bundle")
            self._begun_at = now
        await asyncio.wait({self._writing}, timeout=_BUNDLE_LIMIT_S)
        return self._writing.result() if self._writing.done() else ""

    async def _write_late(self, why: str) -> str:
        lead = self._context.links.lead
        if lead is None:
            return await self.write(time.strftime("%Y%m%d-%H%M%S"), why)
        try:
            found: str = await lead.call("bundle_late", why, timeout_s=_BUNDLE_LIMIT_S)
        except UmbraError as error:
            logger.warning("rank 0's node wrote no bundle: %s", error)
            return ""
        return found

    async def write(self, name: str, why: str) -> str:
        """Called on rank 0's node. Returns lines like `late`."""
        if self._run_dir is None:
            return ""
        path = bundle_path(self._run_dir, name)
        try:
            nodes, state = await asyncio.gather(self._report_nodes(), self._state())
            found = await asyncio.to_thread(write_bundle, path, why, state, nodes)
        except Exception:  # looking at a job must not end it
            logger.exception("cannot write %s", path)
            return ""
        shown = [f"  {line}" for line in found[:_NUM_VERDICTS]]
        return "\n".join([*shown, f"what all processes were doing is in {path}"])

    async def _report_nodes(self) -> dict[str, Files]:
        mine, others = await asyncio.gather(
            self.report_node(), self._context.links.ask_elsewhere("report_node", _NODE_LIMIT_S)
        )
        return {"node-0": mine} | {
            name: {"processes.txt": f"this node does not answer: {report}\n"}
            if isinstance(report, UmbraError)
            else report
            for name, report in others.items()
        }


def _call_lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """The oldest calls of an actor, without streams, which last, and the user's code that waits."""
    calls = [
        f"for {age_s:.1f} s: {label}"
        for age_s, label in found["calls"]
        if label.startswith(("answers", "waits")) and not any(own in label for own in _OWN_CALLS)
    ]
    places = [place for task in found["tasks"] for place in task.split(" > ")]
    by_user = [place for place in places if is_of_user(place)]
    lines = [*calls[:_NUM_LINES], *by_user[:_NUM_LINES]]
    if problem := found.get("problem"):
        lines.append(problem)
    return [f"{name}:", *(f"    {line}" for line in lines)] if lines else []


def write_bundle(
    path: Path, why: str, state: JobState | None, nodes: Mapping[str, Files]
) -> list[str]:
    """Writes the file at once, so that its reader finds it complete. Returns the findings."""
    found = verdicts([_seen(name, files, len(nodes) > 1) for name, files in nodes.items()], state)
    parts = [time.strftime("%Y-%m-%d %H:%M:%S"), why, "", *found]
    if state is not None and state.engines:
        parts += ["", "==== engines", *(_engine_line(engine) for _, engine in state.engines)]
    for name, files in nodes.items():
        title = f"==== {name}: processes, and where their threads are"
        parts += ["", title, files["processes.txt"]]
        if files.get(_WAITING):
            parts += [f"==== {name}: calls that wait", files[_WAITING]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w") as bundle:
        _add(bundle, f"{path.stem}/summary.txt", "\n".join(parts))
        for name, files in nodes.items():
            for file_name, text in files.items():
                _add(bundle, f"{path.stem}/{name}/{file_name}", text)
    return found


def _seen(name: str, files: Files, is_one_of_several: bool) -> SeenNode:
    processes = json.loads(files.get(_PROCESSES, "[]"))
    return SeenNode(
        name=name if is_one_of_several else "",
        processes=[from_wire(SeenProcess, process) for process in processes],
        calls=json.loads(files.get(_CALLS, "{}")),
    )


def _engine_line(engine: EngineStatus) -> str:
    weights = "no weights" if engine.version is None else f"version {engine.version}"
    restarts = f"{engine.num_restarts} restart{'s' * (engine.num_restarts != 1)}"
    return f"{engine.name}#{engine.incarnation}: {engine.state}, {weights}, {restarts}"


def read_summary(path: Path) -> str:
    with tarfile.open(path) as bundle:
        member = bundle.extractfile(f"{path.stem}/summary.txt")
        assert member is not None
        return member.read().decode()


def bundle_path(run_dir: Path, name: str) -> Path:
    return run_dir / "bundles" / f"{name}.tar"


def _add(bundle: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode(errors="replace")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(time.time())
    bundle.addfile(entry, io.BytesIO(content))


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
