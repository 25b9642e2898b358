"""The contents of chosen samples, read from events, compared with a naive model."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from ledger_samples import runs_of

from umbra.runtime.rollout.ledger.ledger_events import (
    Event,
    PromptGiven,
    Recorded,
    Reset,
    TeacherLogprobs,
)
from umbra.runtime.rollout.ledger.sample_contents import read_contents

UIDS = range(4)
MOVES = st.sampled_from(["run", "run", "runs", "roll_back", "reset", "prompt", "record", "teacher"])


@given(moves=st.lists(st.tuples(MOVES, st.sampled_from(UIDS), st.integers(0, 5))), data=st.data())
def test_what_survives_rollbacks_and_resets_is_found(
    moves: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    events: list[Event] = []
    completions: dict[int, list[int]] = {uid: [] for uid in UIDS}
    prompts: dict[int, list[int] | None] = dict.fromkeys(UIDS)
    recorded: dict[int, dict[str, Any]] = {uid: {} for uid in UIDS}
    answers: dict[int, list[float] | None] = dict.fromkeys(UIDS)  # of the teacher
    new_token = itertools.count()
    for move, uid, number in moves:
        match move:
            case "run" | "runs":
                runs: list[tuple[int, int, int, list[int]]] = []
                for of in (uid, (uid + 1) % 4, uid) if move == "runs" else (uid,):
                    tokens = [next(new_token) for _ in range(number + 1)]
                    runs.append((of, len(completions[of]), 0, tokens))
                    completions[of] += tokens
                events.append(runs_of(*runs))
            case "roll_back":  # the event has no uid: what survived shows in the next run's start
                del completions[uid][number:]
            case "reset":
                completions[uid].clear()
                prompts[uid] = None
                events.append(Reset(uid, "its process died"))
            case "prompt":
                prompts[uid] = [number]
                events.append(PromptGiven(uid, np.asarray([number], np.int32)))
            case "teacher":
                answers[uid] = [-number]
                events.append(TeacherLogprobs(uid, np.asarray([-number], np.float32)))
            case _:
                recorded[uid][str(number)] = len(events)
                events.append(Recorded(uid, str(number), len(events)))
    wanted = data.draw(st.lists(st.sampled_from(UIDS), unique=True))

    found = read_contents(events, {uid: len(completions[uid]) for uid in wanted})

    assert list(found) == wanted
    for uid in wanted:
        prompt = found[uid].prompt
        assert found[uid].tokens.tolist() == completions[uid]
        logprobs = found[uid].logprobs
        assert logprobs is not None
        assert logprobs.tolist() == [-token for token in completions[uid]]  # of `runs_of`
        assert (None if prompt is None else prompt.tolist()) == prompts[uid]
        assert found[uid].recorded == recorded[uid]
        answer = found[uid].teacher_logprobs
        assert (None if answer is None else answer.tolist()) == answers[uid]
