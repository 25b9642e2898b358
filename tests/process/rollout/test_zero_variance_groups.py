"""Groups whose rewards are all equal, dropped one after the other, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_rollouts import LiveRollouts

from umbra.runtime.errors import RolloutError
from umbra.runtime.testing.factories import SessionFactory

pytestmark = pytest.mark.process

DROPPING = {
    "drop_zero_variance_groups": True,
    "groups_per_step": 10,
    "group_size": 2,
    "max_new_tokens": 2,
}


@pytest.mark.slow
def test_a_reward_that_tells_nothing_apart_ends_the_run_with_cause_and_remedy(
    umbra_session_factory: SessionFactory, tmp_path: Path
) -> None:
    live = LiveRollouts(umbra_session_factory(), tmp_path, reward="constant", config=DROPPING)
    live.publish(0)

    failures = live.call_as_ranks(lambda rank: live.failure_of_next_batch(rank, 0))

    for failure in failures:
        assert isinstance(failure, RolloutError)
        said = str(failure)
        assert said.startswith("1000 groups in a row were dropped, out of 8 prompts")
        assert "(0.5 in all of them)" in said
        assert "reward function" in said
        assert "rollout.drop_zero_variance_groups = false" in said
    notes = [text for text in umbra_session_factory.notes if "groups were dropped since" in text]
    assert [note.split()[0] for note in notes[:3]] == ["100", "200", "400"]
    assert "needs 10 and has 0" in notes[0]
    assert "rollout.drop_zero_variance_groups is set; the run ends after 1000 in a row" in notes[0]
