"""tests/bench/node_start.py measures both starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.alone]

SCRIPT = Path(__file__).parents[1] / "bench/node_start.py"
LIMIT_S = 300.0


def test_a_start_of_two_nodes_is_measured_beside_bare_torchrun() -> None:
    command = [sys.executable, str(SCRIPT), "--nodes", "2", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    umbra_s, bare_s = (result[name]["first_step_s"] for name in ("umbra", "bare"))
    assert 1.0 < bare_s < umbra_s < LIMIT_S  # both import torch, and umbra's ranks do more
    assert result["beyond_s"] == pytest.approx(umbra_s - bare_s, abs=0.02)
