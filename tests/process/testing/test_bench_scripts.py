"""The benchmark scripts measure real systems and print every number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
TIMEOUT_S = 200.0

pytestmark = [pytest.mark.process, pytest.mark.slow]


def run_script(folder: Path, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / name), *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_rpc_measures_umbra_beside_zmq_and_reports_an_absent_peer_as_null(tmp_path: Path) -> None:
    peerless = tmp_path / "python"
    peerless.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    peerless.chmod(0o700)

    ended = run_script(tmp_path, "rpc.py", "--rounds", "1", "--peer-python", str(peerless))

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["hardware"]["cores"] >= 1
    assert result["ray"] is None
    for system in ("umbra", "bare_zmq"):
        facts = result[system]
        assert 0 < facts["p50_us"] <= facts["p99_us"]
        assert facts["calls_per_s"] > 0
        assert facts["version"]
    assert 0 < result["umbra"]["ready_s"] < result["umbra"]["first_call_s"]


def test_verls_protocol_brings_the_same_weights_in_several_buckets(tmp_path: Path) -> None:
    """The script itself compares them after each sync. 0.1 MiB hold a part of them."""
    options = ("--device", "cpu", "--shape", "tiny", "--bucket-mib", "0.1", "--rounds", "1")

    ended = run_script(tmp_path, "verl_protocol.py", *options)

    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert facts["nbytes"] == 263_040
    assert 0 < facts["copy_s"] < facts["verl_s"]


@pytest.mark.parametrize(
    "options",
    [["--checksums"], ["--ranks", "2"]],
    ids=["one rank", "two ranks"],
)
def test_the_parts_of_a_sync_to_a_pool_make_up_the_whole(
    tmp_path: Path, options: list[str]
) -> None:
    ended = run_script(tmp_path, "weights.py", "--shape", "tiny", "--syncs", "3", *options)

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["nbytes"] == 263_040
    kinds = [result, *([result["checksums"]] if "checksums" in result else [])]
    assert [kind["num_syncs"] for kind in kinds] == ([2, 1] if "--checksums" in options else [3])
    for kind in kinds:
        assert 0 < kind["engine_load_s"] < kind["transfer_s"]
        assert 0 < kind["paused_to_committed_s"] < kind["sync_s"] < kind["publish_s"]
        assert min(kind["prepare_s"], kind["commit_s"], kind["resume_s"]) > 0
    assert result["verify_s"] == 0
    assert kinds[-1]["verify_s"] > 0 or "checksums" not in result
    assert min(result["wake_s"], result["wake_kv_cache_s"]) > 0
    assert result["pause_s"] == 0  # it was asleep
    has_peer = "--checksums" in options  # one rank, one engine on its GPU
    assert [name in result for name in ("verl_s", "copy_s")] == [has_peer, has_peer]


def test_only_the_changed_weights_cross_to_another_node(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "node_weights.py", "--rounds", "1", "--megabytes", "32")

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    whole, changed = result["all"]["network_mb"], result["changed"]["network_mb"]
    assert 20 < whole < 40
    assert changed < whole / 20
    assert min(result[pool][name] for pool in ("all", "changed") for name in result[pool]) > 0


def test_a_killed_engine_is_replaced_within_a_measured_time(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "engine_restart.py", "--kills", "1")

    assert ended.returncode == 0, ended.stderr
    facts = json.loads(ended.stdout)
    assert 0 < facts["added_s"] == facts["added_max_s"] < facts["start_s"] + 10
    assert facts["end_to_spawn_s"] + facts["ready_to_token_s"] == pytest.approx(
        facts["added_s"], abs=0.01
    )


def test_a_small_soak_kills_resumes_and_reads_a_run_and_leaves_nothing(tmp_path: Path) -> None:
    options = ("--steps", "8", "--samples", "16", "--tokens", "16", "--folder", str(tmp_path))

    done = run_script(tmp_path, "soak.py", *options)

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
