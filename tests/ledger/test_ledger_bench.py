"""The benchmark of the ledger runs and says what it promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbra.runtime.bench import ledger


def test_a_small_benchmark_gives_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_PACED_S", 0.1)

    facts = ledger.run(256, tmp_path)

    assert set(facts) == {
        "trajectories_per_s", "cpu_us_per_trajectory", "blocked_max_ms", "append_max_ms",
        "replayed_per_s", "nbytes_per_trajectory", "paced_blocked_max_ms", "idle_blocked_max_ms",
    }  # fmt: skip
    blocked = {name for name in facts if "blocked" in name}  # a short run may be over before that
    assert all(facts[name] >= 0 for name in blocked)
    assert all(facts[name] > 0 for name in facts.keys() - blocked)
    assert facts["nbytes_per_trajectory"] > 256 * 8
    assert not list(tmp_path.iterdir())
