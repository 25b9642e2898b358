"""The benchmark scripts measure real systems, take medians, and report what is missing as null."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import delta_bench
import ledger_bench
import manager_loop
import pytest
import rpc
import startup
import torch
import update_gap
import weights
import worker_bench
from bench_rounds import median_of
from call_timing import gathers, measure_throughput, summarise, workers

from umbra.runtime.cluster.lead_link import HEARTBEAT_S, LOST_AFTER_S

TIMEOUT_S = 200.0


def run_script(folder: Path, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def makes_namespaces() -> bool:
    """Whether this user may have a network of its own, as cluster.py needs."""
    if shutil.which("unshare") is None:
        return False
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--net", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def peer_python(folder: Path, command: str) -> str:
    """A script that runs `command` as the peers' interpreter."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o700)
    return str(script)


@pytest.mark.slow
@pytest.mark.process
def test_rpc_measures_umbra_beside_zmq_and_reports_absent_peers_as_null(tmp_path: Path) -> None:
    peerless = peer_python(tmp_path, f'exec {sys.executable} -I -S "$@"')

    ended = run_script(tmp_path, "rpc.py", "--json", "--rounds", "1", "--peer-python", peerless)

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["bench"] == "rpc"
    assert result["rounds"] == 1
    assert result["hardware"]["cores"] >= 1
    assert [result[peer] for peer in ("ray", "monarch", "xoscar")] == [None, None, None]
    assert "errors" not in result
    for system in ("umbra", "bare_zmq"):
        facts = result[system]
        assert 0 < facts["p50_us"] <= facts["p99_us"]
        assert facts["calls_per_s"] > 0
        assert result["versions"][system]
    assert 0 < result["umbra"]["ready_s"] < result["umbra"]["first_call_s"]
    assert 10 < result["umbra"]["resident_mb"] < 500


@pytest.mark.slow
@pytest.mark.process
def test_startup_prints_a_table_and_what_failed_or_is_absent(tmp_path: Path) -> None:
    """The peers' programs need nothing of ours installed: Ray's gets as far as its own import."""
    (tmp_path / "ray.py").write_text("raise RuntimeError('this Ray is broken')")
    with_ray = f'PYTHONPATH="$PYTHONPATH:{tmp_path}" exec {sys.executable} -S "$@"'
    peers = peer_python(tmp_path, with_ray)

    ended = run_script(tmp_path, "startup.py", "--rounds", "1", "--peer-python", peers)

    assert ended.returncode == 0, ended.stderr
    assert "supervisor_resident_mb" in ended.stdout
    assert "ray failed: ray_actor ended with status 1" in ended.stdout
    assert "RuntimeError: this Ray is broken" in ended.stdout
    assert "xoscar is not installed in the peers' environment" in ended.stdout


@pytest.mark.slow
@pytest.mark.process
def test_verls_protocol_brings_the_same_weights_in_several_buckets_and_in_one(
    tmp_path: Path,
) -> None:
    """The script itself compares them after each sync. 0.05 MiB hold all but the embedding."""
    options = ["--device", "cpu", "--shapes", "tiny", "--buckets-mib", "0.05", "1"]

    ended = run_script(tmp_path, "verl_protocol.py", *options, "--rounds", "1", "--json")

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    for case in ("tiny, 0.05 MiB", "tiny, 1 MiB"):
        facts = result[case]
        assert facts["nbytes"] == 263_040
        assert 0 < facts["verl_min_s"] <= facts["verl_s"] <= facts["verl_max_s"]
        assert 0 < facts["copy_s"] < facts["first_s"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "title"),
    [
        (["--ranks", "2", "--checksums"], "float32 on 2 ranks, to embedded, memfd, with and "),
        (["--mode", "standalone", "--requests", "4"], "float32, to embedded, memfd, standalone"),
    ],
    ids=["hybrid", "standalone"],
)
def test_the_parts_of_a_sync_to_a_pool_make_up_the_whole(
    tmp_path: Path, options: list[str], title: str
) -> None:
    case = ["--engine", "embedded", "--shape", "tiny", "--syncs", "3", *options]

    ended = run_script(tmp_path, "weights.py", *case)

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["case"].startswith(f"tiny, {title}")
    assert result["nbytes"] == 263_040
    kinds = [result, *([result["checksums"]] if "checksums" in result else [])]
    assert [kind["num_syncs"] for kind in kinds] == ([2, 1] if "--checksums" in options else [3])
    for kind in kinds:
        assert 0 < kind["engine_load_s"] < kind["transfer_s"]
        assert 0 < kind["paused_to_committed_s"] < kind["sync_s"] < kind["publish_s"]
        assert min(kind["prepare_s"], kind["commit_s"], kind["resume_s"]) > 0
    assert result["verify_s"] == 0
    assert kinds[-1]["verify_s"] > 0 or "checksums" not in result
    assert result["copy_s"] > 0
    if "--checksums" in options:
        assert min(result["wake_s"], result["wake_kv_cache_s"]) > 0
        assert result["pause_s"] == 0  # it was asleep
        assert result["verl_s"] > 0
    else:
        assert result["wake_s"] == 0 < result["pause_s"]
        assert result["usual_token_gap_s"] < result["token_gap_s"] < 1
        assert 0 < result["usual_token_gap_s"] <= result["longest_usual_token_gap_s"]
        assert result["verl_s"] is None


@pytest.mark.slow
@pytest.mark.process
def test_checksums_are_measured_beside_a_plain_read(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--shape", "tiny", "--rounds", "1", "--json")

    done = run_script(tmp_path, "checksum.py", *options)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for case, nbytes in (("as they are", 263_040), ("cast", 526_080)):
        assert found[case]["bytes"] == nbytes
        assert found[case]["seconds"] > 0
        assert found[case]["read_seconds"] > 0


def test_medians_are_taken_of_numbers_and_the_commonest_of_texts() -> None:
    rows: list[dict[str, Any]] = [
        {"p50_us": 300.0, "idiom": "gather"},
        {"p50_us": 1.0, "idiom": "tasks", "late_s": 4.0},
        {"p50_us": 200.0, "idiom": "gather"},
    ]

    assert median_of(rows) == {"p50_us": 200.0, "idiom": "gather", "late_s": 4.0}


def test_percentiles_are_those_of_the_samples() -> None:
    samples_s = [idx / 1e6 for idx in range(1000, 0, -1)]

    assert summarise(samples_s) == {"p50_us": 501.0, "p99_us": 991.0}


def test_throughput_is_that_of_the_fastest_way_of_calling() -> None:
    in_flight = 0
    most_in_flight = 0

    async def call() -> None:
        nonlocal in_flight, most_in_flight
        in_flight += 1
        most_in_flight = max(most_in_flight, in_flight)
        await asyncio.sleep(0.002)
        in_flight -= 1

    candidates = gathers(call, 1) | workers(call, 50)
    facts = asyncio.run(measure_throughput(candidates, 0.1))

    assert facts["idiom"] == "50 tasks"
    assert most_in_flight == 50
    rate = facts["calls_per_s"]
    assert isinstance(rate, int)
    assert 1000 < rate <= 50 / 0.002


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not makes_namespaces(), reason="needs unshare, ip, and the right to use them")
def test_weights_cross_the_network_once_for_all_engines_of_a_node(tmp_path: Path) -> None:
    options = ("--json", "--rounds", "1", "--megabytes", "32", "--engines-elsewhere", "3")

    ended = run_script(tmp_path, "weights.py", *options)

    assert ended.returncode == 0, ended.stderr
    measured = json.loads(ended.stdout)["umbra"]
    assert measured["weights_mb"] < measured["network_mb"] < 1.1 * measured["weights_mb"]


@pytest.mark.slow
@pytest.mark.process
def test_the_cost_of_asking_for_a_jobs_state_is_measured(tmp_path: Path) -> None:
    done = run_script(tmp_path, "job_state.py", "--engines", "2", "--seconds", "1")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engines"] == 2
    assert 0 < found["answer_ms_p50"] <= found["answer_ms_max"]


@pytest.mark.slow
@pytest.mark.process
def test_the_cost_of_the_web_page_is_measured(tmp_path: Path) -> None:
    options = ("--engines", "2", "--samples", "1024", "--seconds", "1")

    done = run_script(tmp_path, "dash.py", *options)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engines"] == 2
    for kind in ("state", "samples of a step", "text of a sample"):
        assert 0 < found[kind]["p50_ms"] <= found[kind]["max_ms"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not makes_namespaces(), reason="needs unshare, ip, and the right to use them")
def test_cluster_measures_two_nodes_and_models_more(tmp_path: Path) -> None:
    options = ("--json", "--nodes", "2", "--rounds", "1", "--rest-s", "1")

    ended = run_script(tmp_path, "cluster.py", *options)

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    measured = result["2 nodes"]
    assert all(value > 0 for value in measured.values()), measured
    assert measured["pause_ms"] <= measured["pause_max_ms"] < 5_000
    assert measured["rest_kb_per_s"] == measured["lead_kb_per_s"] < 20
    assert LOST_AFTER_S - HEARTBEAT_S - 1 < measured["lost_s"] < LOST_AFTER_S + 10
    assert list(result["model"]) == ["8", "64", "256", "512", "1024", "2048", "4096"]
    assert result["model"]["8"]["pause_ms"] < result["model"]["4096"]["pause_ms"]


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        (rpc, ["--rounds", "0"], "'0' is not a positive whole number"),
        (startup, ["--peer-python", "/no/such/python"], "/no/such/python is not Python 3.11"),
        (startup, ["--peer-python", "/bin/false"], "/bin/false is not Python 3.11"),
        pytest.param(
            weights,
            ["--device", "cuda"],
            "no usable CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has what is asked for"),
        ),
    ],
)
def test_wrong_use_exits_with_2_and_names_the_cause(
    script: ModuleType,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *options])

    with pytest.raises(SystemExit) as exit_:
        script.main()

    output = capsys.readouterr()
    assert exit_.value.code == 2
    assert message in output.err
    assert output.out == ""


@pytest.mark.slow
@pytest.mark.process
def test_a_small_benchmark_of_deltas_gives_every_number() -> None:
    facts = delta_bench.run(500, 1.0)
    best = facts["tokens_per_cpu_s"]
    for _ in range(2):  # anything may slow down a process of a busy machine
        if best <= 50_000:
            best = max(best, delta_bench.run(500, 1.0)["tokens_per_cpu_s"])

    assert facts["tokens_per_s"] > 0
    assert best > 50_000
    # a run has 2 or 3 tokens
    assert 2e6 < facts["tokens_per_cpu_s"] * facts["cpu_us_per_run"] < 3e6
    assert 0 < facts["delta_p50_ms"] <= facts["delta_p99_ms"]
    assert facts["num_finished"] > 0
    # 500 in flight, 2.5 tokens each a tick of 50 ms; a busy machine may miss ticks
    assert 5_000 < facts["paced_tokens_per_s"] < 30_000
    assert facts["bytes_per_trajectory"] > 8 * facts["tokens_per_trajectory"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_a_small_benchmark_of_short_requests_with_the_ledger_gives_every_number() -> None:
    facts = delta_bench.run(500, 1.0, completion_len=16, has_ledger=True)

    assert facts["requests_per_s"] > 0
    assert facts["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_a_small_benchmark_of_workers_gives_every_number() -> None:
    facts = worker_bench.run(4, 0.5)

    assert len(facts) == 4
    assert all(rate > 0 for rate in facts.values())


@pytest.mark.slow
@pytest.mark.process
def test_a_small_benchmark_of_weight_updates_gives_every_number() -> None:
    facts = update_gap.run(2, "abort")

    assert 0 < facts["update_gap_first_ms"] <= facts["update_gap_ms"] <= facts["update_gap_max_ms"]
    assert facts["update_silence_ms"] > 0


def test_a_small_ledger_benchmark_gives_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_bench, "_PACED_S", 0.1)

    facts = ledger_bench.run(256, tmp_path)

    assert set(facts) == {
        "trajectories_per_s", "cpu_us_per_trajectory", "blocked_max_ms", "append_max_ms",
        "replayed_per_s", "nbytes_per_trajectory", "paced_blocked_max_ms", "idle_blocked_max_ms",
    }  # fmt: skip
    blocked = {name for name in facts if "blocked" in name}  # a short run may be over before that
    assert all(facts[name] >= 0 for name in blocked)
    assert all(facts[name] > 0 for name in facts.keys() - blocked)
    assert facts["nbytes_per_trajectory"] > 256 * 4
    assert not list(tmp_path.iterdir())


def test_a_small_benchmark_of_the_managers_loop_gives_every_number() -> None:
    assert manager_loop.run_plan(2, 8) > 0
    assert manager_loop.run_sync(2, 4) > 0
    assert manager_loop.run_cancel(16) > 0


@pytest.mark.slow
@pytest.mark.process
def test_a_small_soak_kills_resumes_and_reads_a_run_and_leaves_nothing(tmp_path: Path) -> None:
    options = ("--steps", "8", "--samples", "16", "--tokens", "16", "--folder", str(tmp_path))

    done = run_script(tmp_path, "soak.py", *options, "--json")

    assert done.returncode in (0, 1), done.stderr  # so short a run says nothing about growth
    found = json.loads(done.stdout)
    assert bool(done.returncode) == bool(found["missed"])
    assert not any("samples of trained steps" in line for line in found["missed"])
    first, last = found["4 steps"], found["8 steps"]
    for name in ("manager_back", "ledger", "samples", "dash", "plot", "top"):
        assert min(first[f"{name}_s"], last[f"{name}_s"]) > 0
        assert 10 < first[f"{name}_mb"] < 500
    assert first["manager_back_groups"] == 2  # of the step in which the manager was killed
    assert last["resume_steps_back"] == 2
    assert last["resume_groups"] >= 2 * 2
    assert set(found["at most"]) <= first.keys() | last.keys()
    assert not list(tmp_path.iterdir())
