"""The rollout benchmark gives all its numbers, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 200.0


@pytest.mark.slow
@pytest.mark.process
def test_rollout_measures_deltas_ledger_and_updates(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--trajectories", "500", "--seconds", "1"]

    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "umbra.runtime.cli.umbra_command",
            "bench",
            "rollout",
            "--json",
            *options,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["bench"] == "rollout"
    facts = result["umbra"]
    assert facts["tokens_per_s"] > 0
    assert facts["tokens_per_cpu_s"] > 50_000
    assert 0 < facts["delta_p50_ms"] <= facts["delta_p99_ms"]
    assert facts["num_finished"] > 0
    # 500 in flight, 2.5 tokens each a tick of 50 ms; a busy machine may miss ticks
    assert 5_000 < facts["paced_tokens_per_s"] < 30_000
    assert facts["bytes_per_trajectory"] > 8 * facts["tokens_per_trajectory"] > 0
    assert {"cpu_us_per_run_at_50", "cpu_us_per_run_at_2500"} <= facts.keys()
    assert facts["trajectories_per_s"] > 0
    assert facts["ledger_blocked_max_ms"] > 0
    assert 0 < facts["update_gap_first_ms"] <= facts["update_gap_ms"] <= facts["update_gap_max_ms"]
    assert facts["update_gap_keep_ms"] > 0
    assert min(facts["update_silence_ms"], facts["update_silence_rolling_ms"]) > 0
