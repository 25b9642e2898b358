"""The state of all processes of a job in one file, for a person who wonders why it hangs.

    who asks ──▶ lead: every node's report, and the state of the job ──▶ RUN_DIR/bundles/NAME.tar
                  └▶ supervisors of the other nodes: their report

The file has a `summary.txt`, which begins with the findings (see `hang_verdicts`), and for each
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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from umbra.runtime.actor.node_actors import NodeActors
from umbra.runtime.actor.node_context import NodeContext
from umbra.runtime.disk import replacing
from umbra.runtime.errors import UmbraError
from umbra.runtime.reports.hang_verdicts import SeenNode, verdicts
from umbra.runtime.reports.job_state import EngineStatus, JobState
from umbra.runtime.reports.process_report import SeenProcess, is_of_user, report_processes
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
