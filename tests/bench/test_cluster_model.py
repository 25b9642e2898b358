"""The model of larger jobs gives the numbers that can be worked out by hand."""

from __future__ import annotations

import pytest
from cluster_model import ClusterCosts, fan_out_s, model, most_nodes

COSTS = ClusterCosts(
    ready_s=0.5,
    join_cpu_s=0.002,
    engine_s=2.0,
    engine_cpu_s=0.01,
    call_cpu_s=0.0004,
    call_s=0.0014,
    call_nbytes=500.0,
    manifest_cpu_s=0.001,
    manifest_nbytes=30_000.0,
    look_cpu_s=1e-7,
    link_cpu_s=0.004,
    link_threads=3.0,
    link_fds=7.0,
    rest_cpu_s=0.001,
    rest_nbytes=800.0,
)


@pytest.mark.parametrize(
    ("num_peers", "num_calls", "cpu_s", "away_s", "expected_s"),
    [
        (1, 1, 2.0, 3.0, 5.0),  # sent at 1, answered at 4, read at 5
        (1, 2, 2.0, 3.0, 10.0),
        (2, 1, 2.0, 10.0, 13.0),  # sent at 1 and 2, answered at 11 and 12
        (3, 1, 2.0, 0.0, 6.0),  # the lead is never idle
        (100, 1, 2.0, 10.0, 200.0),
        (100, 4, 2.0, 10.0, 800.0),
    ],
)
def test_the_lead_is_idle_only_while_all_peers_are_busy(
    num_peers: int, num_calls: int, cpu_s: float, away_s: float, expected_s: float
) -> None:
    assert fan_out_s(num_peers, num_calls, cpu_s, away_s) == pytest.approx(expected_s)


def test_a_small_job_takes_what_one_node_takes() -> None:
    facts = model(1, COSTS)

    assert facts["pause_ms"] == pytest.approx(1.4)
    assert facts["join_s"] == pytest.approx(0.003)
    assert facts["start_s"] == pytest.approx(0.5 + 0.003 + 2.01)
    assert facts["recovery_s"] == pytest.approx(8.0 + 0.0014 + facts["start_s"])
    assert facts["sync_s"] == pytest.approx(0.001 + 9 * 0.0014)
    assert facts["sync_mb"] == pytest.approx(0.0345)


def test_a_large_job_takes_the_work_of_the_lead() -> None:
    facts = model(4096, COSTS)

    assert facts["pause_ms"] == pytest.approx(4096 * 0.4)
    assert facts["join_s"] == pytest.approx(4096 * 0.002)
    assert facts["lead_core_at_rest"] == pytest.approx(4.096)
    assert facts["lead_kb_per_s"] == pytest.approx(3276.8)
    assert facts["lead_core_while_loading"] == pytest.approx(4096 * 0.002401)
    assert facts["links"] == 4096 * 4095
    assert facts["links_of_rank_s"] == pytest.approx(4095 * 0.004)
    assert facts["threads_of_rank"] == 4095 * 3
    assert facts["fds_of_rank"] == 4095 * 7


def test_the_limits_are_those_of_the_lead() -> None:
    assert list(most_nodes(COSTS).values()) == [4000, 1000, 416, 146, 122]
