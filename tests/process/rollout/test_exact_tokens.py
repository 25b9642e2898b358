"""Interrupted trajectories equal uninterrupted ones, under kills, moves, aborts and versions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from exact_runs import Work, run_in_peace, run_interrupted

from umbra.runtime.session.session import Session

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_in_float64_nothing_differs(
    umbra_session: Session, tmp_path: Path, umbra_tiny_model_dir: Path
) -> None:
    work = Work()
    wanted = asyncio.run(run_in_peace(umbra_tiny_model_dir, work))

    found, happened = run_interrupted(umbra_session, tmp_path, umbra_tiny_model_dir, work)

    assert found.keys() == wanted.keys()
    assert len(found) == work.num_samples
    assert [name for name in wanted if found[name].tokens != wanted[name].tokens] == []
    assert [name for name in wanted if found[name].logprobs != wanted[name].logprobs] == []
    # The run was as rough as it was meant to be.
    assert happened.syncs == work.num_steps + 1
    assert happened.segments >= work.num_samples + happened.cut_trajectories
    assert happened.cuts >= work.num_samples // 4
    assert happened.cut_trajectories >= work.num_samples // 10
    assert happened.counters["aborts"] >= work.num_samples // 10
    assert happened.kills >= 2
    assert happened.engine_aborts >= 1
    assert happened.counters["engines_lost"] >= happened.kills + 2, "streams that broke"
