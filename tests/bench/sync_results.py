"""The numbers of a case, from the files of its ranks and from the trace of its run.

The supervisor's report has the four phases of a sync: prepare, transfer, verify, commit. The first
one ends with the engine's pause, the second one begins with the wake of its weights, and in the
last one its KV cache wakes and it resumes. The trace has each of these alone, on one clock.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from sync_case import ENGINE, POOL, SyncCase

from umbra.runtime.tracing.spans import TraceEvent
from umbra.runtime.tracing.trace_files import LEAD, TraceFiles

_SYNC_TRACK: Final = f"weight sync of {POOL}"
_TRANSFER: Final = "transferring"
_WAKE: Final = "wake weights"
_LAST_WAKE: Final = "wake kv_cache"


def case_results(case: SyncCase, folder: Path) -> dict[str, Any]:
    """Medians over the syncs after the first one, in seconds.

    Returns:
        `sync_s` is `publish_s` without the engine's pause, wakes and resumption.
        `paused_to_committed_s` is the sum of `transfer_s` and `verify_s`. It begins when the
        engine's weights are awake, or if they did not sleep with the call that loads, and it ends
        when the supervisor commits the version to the pool. `prepare_s` is the time before it
        without the pause, `commit_s` that after it without the wake of the KV cache and the
        resumption, mostly a message to the engine and its answer. `engine_load_s` is the engine's
        part of the transfer. `checksums` has the same of syncs with checksums. `token_gap_s` is the
        longest time between two tokens of one request around a sync, `usual_token_gap_s` the median
        at other times. `extra_gpu_nbytes` is by how much the use of each GPU grew from before the
        first sync to after the fifth one that follows it.
    """
    facts = json.loads((folder / "facts.json").read_text())
    spans = sync_spans(folder / "run")
    syncs = {
        version: sync_timings(report, spans[version])
        for version, report in enumerate(facts["syncs"], start=1)
    }
    first = syncs.pop(1)
    checked = [timings for version, timings in syncs.items() if case.is_checked(version)]
    plain = [timings for version, timings in syncs.items() if not case.is_checked(version)]
    results: dict[str, Any] = {"nbytes": facts["nbytes"], "num_syncs": len(plain)}
    results |= medians(plain) | {"first_sync_s": round(first["sync_s"], 5)}
    if checked:
        results["checksums"] = {"num_syncs": len(checked), **medians(checked)}
    if facts["gaps"]:
        results |= medians([_gap_timings(gaps) for gaps in facts["gaps"]])
    results |= _reference(case, folder / "reference.json")
    results["cast_copy_s"] = round(statistics.median(facts["cast_copy_s"]), 5)
    if facts["used_nbytes"]:
        before, after = facts["used_nbytes"]
        results["extra_gpu_nbytes"] = [b - a for a, b in zip(before, after, strict=True)]
    return results


def _reference(case: SyncCase, path: Path) -> dict[str, Any]:
    """`verl_s`, or None and the reason as `no_verl_s`; and `copy_s` if it was measured."""
    measured: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    facts: dict[str, Any] = {
        "verl_s": None,
        **{name: round(seconds, 5) for name, seconds in measured.items()},
    }
    if case.mode == "standalone":
        facts["no_verl_s"] = "verl's protocol is between processes on one GPU"
    elif not measured:
        facts["no_verl_s"] = "sync_reference.py failed"
    return facts


class Span(NamedTuple):
    """By the wall clock, in seconds."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def sync_spans(run_dir: Path) -> dict[int, dict[str, Span]]:
    """By version, what the engine and the supervisor did in its sync, by name."""
    files = TraceFiles(run_dir)
    events = [
        (event.name, event)
        for _, event in files.events(process="supervisor")
        if event.track in (ENGINE, _SYNC_TRACK) and event.name in ("pause", "load", _TRANSFER)
    ]
    for _, event in files.events(process=ENGINE):
        name = f"wake {event.args['tags']}" if event.name == "wake" else event.name
        if name in (_WAKE, _LAST_WAKE, "load weights", "resume"):
            events.append((name, event))
    syncs = [event for _, event in files.events(process=LEAD) if event.name == "sync"]
    return {int(sync.args["version"]): _spans_within(sync, events) for sync in syncs}


def _spans_within(sync: TraceEvent, events: Sequence[tuple[str, TraceEvent]]) -> dict[str, Span]:
    return {
        name: Span(event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9)
        for name, event in events
        if sync.start_ns <= event.start_ns < sync.start_ns + sync.duration_ns
    }


def sync_timings(report: Mapping[str, Any], spans: Mapping[str, Span]) -> dict[str, float]:
    """The parts of one sync.

    Args:
        report: the fields of its `SyncReport`, and `publish_s`.
        spans: by their name; those that the sync did not need are missing.
    """
    pause_s, wake_s, last_wake_s, resume_s = (
        spans[name].duration_s if name in spans else 0.0
        for name in ("pause", _WAKE, _LAST_WAKE, "resume")
    )
    ready_s = spans[_WAKE].end_s if _WAKE in spans else spans["load"].start_s
    transfer_s = spans[_TRANSFER].end_s - ready_s
    return {
        "sync_s": report["publish_s"] - pause_s - wake_s - last_wake_s - resume_s,
        "paused_to_committed_s": transfer_s + report["verify_s"],
        "prepare_s": report["prepare_s"] - pause_s,
        "transfer_s": transfer_s,
        "verify_s": report["verify_s"],
        "commit_s": report["resume_s"] - last_wake_s - resume_s,
        "engine_load_s": spans["load weights"].duration_s,
        "publish_s": report["publish_s"],
        "pause_s": pause_s,
        "wake_s": wake_s,
        "wake_kv_cache_s": last_wake_s,
        "resume_s": resume_s,
    }


def _gap_timings(gaps: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of one sync, see `GapManager.token_gaps`."""
    return {
        "token_gap_s": gaps["sync"]["longest"],
        "usual_token_gap_s": gaps["usual"]["median"],
        "longest_usual_token_gap_s": gaps["usual"]["longest"],
    }


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 5) for key in rows[0]}
