"""Agent loops generate with adapters of the policy's pool; none of it is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapted_echo import ADAPTED, CRITIC_SEED
from live_rollouts import VOCAB_SIZE, LiveRollouts, merged

from umbra.engines.echo.echo_engine import EchoTokens
from umbra.runtime.session.session import Session

pytestmark = [pytest.mark.process, pytest.mark.slow]


def start(session: Session, folder: Path, agent: str) -> LiveRollouts:
    live = LiveRollouts(
        session,
        folder,
        agent=agent,
        reward="",
        pool=ADAPTED,
        config={"max_new_tokens": 15, "max_failed_share": 0.0},
    )
    live.publish(0)
    return live


def test_tokens_of_an_adapter_are_given_and_stay_when_the_loop_runs_again(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = start(umbra_session, tmp_path, "asks_adapters")

    samples = merged(live.next_batch(0))

    assert (tmp_path / "marker").exists()
    assert len(samples) == 16
    for sample in samples.values():
        said = sample["completion"][5:9]
        asked = EchoTokens(CRITIC_SEED, sample["tokens"][: 3 + 5], vocab_size=VOCAB_SIZE)
        assert said == asked.draw(4).tokens.tolist()
        assert sum(sample["mask"]) == 15
        assert len(sample["completion"]) == 15 + 4 + 3
    agents = live.manager.call("stats")["agents"]
    assert agents["replayed_turns"] >= 2
    assert agents["diverged"] == 0


def test_an_unknown_adapter_fails_the_loop_with_those_that_are_there(
    umbra_session: Session, tmp_path: Path
) -> None:
    live = start(umbra_session, tmp_path, "asks_unknown_adapter")

    errors = live.call_as_ranks(lambda rank: live.failure_of_next_batch(rank, 0))

    assert all("no LoRA adapter 'nobody'; known: none" in str(error) for error in errors)
