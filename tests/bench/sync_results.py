"""The numbers of a case, from the files of its ranks and from the trace of its run.

The supervisor's report has the four phases of a sync: prepare, transfer, verify, commit. The first
one ends with the engine's pause and the wake of its weights, the last one with the wake of its KV
cache and its resumption. The trace has each of these requests alone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sync_case import ENGINE, SyncCase

from umbra.runtime.tracing.spans import TraceEvent
from umbra.runtime.tracing.trace_files import LEAD, TraceFiles

_LAST_WAKE: Final = "wake of the KV cache"


def case_results(case: SyncCase, folder: Path) -> dict[str, Any]:
    """Medians over the syncs after the first one, in seconds.

    Returns:
        `sync_s` is `publish_s` without the engine's pause, wakes and resumption.
        `paused_to_committed_s` is the sum of `transfer_s`, `verify_s` and `commit_s`. `prepare_s`
        is the time before it without the pause and the wake of the weights.
        `load_s` is the engine's part of the transfer by the supervisor's clock, `engine_load_s` by
        its own. `checksums` has the same of syncs with checksums. `token_gap_s` is the longest time
        between two tokens of one request around a sync, `usual_token_gap_s` the median at other
        times. `extra_gpu_nbytes` is by how much the use of each GPU grew from before the first sync
        to after the fifth one that follows it.
    """
    facts = json.loads((folder / "facts.json").read_text())
    requests = request_seconds(folder / "run")
    syncs = {
        version: sync_timings(report, requests[version])
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


def request_seconds(run_dir: Path) -> dict[int, dict[str, float]]:
    """By version, the seconds of each request to the engine, and of its own `load weights`."""
    files = TraceFiles(run_dir)
    requests = [
        event for _, event in files.events(process="supervisor") if event.track == ENGINE
    ] + [event for _, event in files.events(process=ENGINE) if event.name == "load weights"]
    requests.sort(key=lambda event: event.start_ns)
    syncs = [event for _, event in files.events(process=LEAD) if event.name == "sync"]
    return {int(sync.args["version"]): _seconds_within(sync, requests) for sync in syncs}


def _seconds_within(sync: TraceEvent, requests: Sequence[TraceEvent]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for event in requests:
        if sync.start_ns <= event.start_ns < sync.start_ns + sync.duration_ns:
            is_last_wake = event.name == "wake" and "commit_update" in seconds
            seconds[_LAST_WAKE if is_last_wake else event.name] = event.duration_ns / 1e9
    return seconds


def sync_timings(report: Mapping[str, Any], requests: Mapping[str, float]) -> dict[str, float]:
    """The parts of one sync.

    Args:
        report: the fields of its `SyncReport`, and `publish_s`.
        requests: seconds by their name; those that the sync did not need are missing.
    """
    pause_s, wake_s, last_wake_s, resume_s = (
        requests.get(name, 0.0) for name in ("pause", "wake", _LAST_WAKE, "resume")
    )
    phases = {
        "transfer_s": report["transfer_s"],
        "verify_s": report["verify_s"],
        "commit_s": report["resume_s"] - last_wake_s - resume_s,
    }
    return {
        "sync_s": report["publish_s"] - pause_s - wake_s - last_wake_s - resume_s,
        "paused_to_committed_s": sum(phases.values()),
        "prepare_s": report["prepare_s"] - pause_s - wake_s,
        **phases,
        "load_s": report["engines"][ENGINE]["load_s"],
        "engine_load_s": requests["load weights"],
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
