"""The benchmark measures real systems, takes medians, and reports what is missing as null."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from umbra.runtime.bench.program import linked_package
from umbra.runtime.bench.rounds import median_of
from umbra.runtime.bench.timing import gathers, measure_throughput, summarise, workers
from umbra.runtime.cli.umbra_command import main

TIMEOUT_S = 100.0


def run_bench(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "umbra.runtime.cli.umbra_command", "bench", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def peerless_python(tmp_path: Path) -> str:
    """An interpreter without any package: no peer can be there."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    script.chmod(0o700)
    return str(script)


@pytest.mark.slow
@pytest.mark.process
def test_rpc_measures_umbra_beside_zmq_and_reports_absent_peers_as_null(
    tmp_path: Path, peerless_python: str
) -> None:
    ended = run_bench(tmp_path, "rpc", "--json", "--rounds", "1", "--peer-python", peerless_python)

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["bench"] == "rpc"
    assert result["rounds"] == 1
    assert result["hardware"]["cores"] >= 1
    assert [result[peer] for peer in ("ray", "monarch", "xoscar")] == [None, None, None]
    for system in ("umbra", "bare_zmq"):
        facts = result[system]
        assert 0 < facts["p50_us"] <= facts["p99_us"]
        assert facts["calls_per_s"] > 0
        assert result["versions"][system]
    assert 0 < result["umbra"]["ready_s"] < result["umbra"]["first_call_s"]
    assert 10 < result["umbra"]["resident_mb"] < 500


@pytest.mark.slow
@pytest.mark.process
def test_startup_measures_the_supervisor_and_prints_a_table(
    tmp_path: Path, peerless_python: str
) -> None:
    ended = run_bench(tmp_path, "startup", "--rounds", "1", "--peer-python", peerless_python)

    assert ended.returncode == 0, ended.stderr
    assert "supervisor_resident_mb" in ended.stdout
    assert "ray is not installed in the peers' environment" in ended.stdout


@pytest.mark.process
def test_a_system_that_fails_is_null_and_its_output_is_kept(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from umbra.runtime.bench.program import System\n"
        "from umbra.runtime.bench.rounds import compare\n"
        "broken = System(name='umbra', program='no_such_program', requires='zmq', is_peer=False)\n"
        "print(json.dumps(compare('rpc', [broken], rounds=2, peer_python=sys.executable,\n"
        "                         duration_s=0.0)))"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=True, timeout=60
    )

    result = json.loads(ended.stdout)
    assert result["umbra"] is None
    assert "no_such_program" in result["errors"]["umbra"]


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


def test_a_peers_interpreter_needs_nothing_of_ours_installed() -> None:
    with linked_package() as folder:
        done = subprocess.run(
            [sys.executable, "-S", "-c", "import umbra.runtime.bench.systems.report"],
            env={"PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is what it asks for")
def test_a_gpu_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "weights", "--device", "cuda"]) == 2

    assert "no usable CUDA device" in capsys.readouterr().err
