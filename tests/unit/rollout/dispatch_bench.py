"""A dispatcher alone: turns go in, inboxes keep what engines would get, deltas are made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rollout_samples import make_trajectory

from umbra.runtime.engine_api.token_deltas import DeltaBatch
from umbra.runtime.errors import UmbraError
from umbra.runtime.rollout.dispatch.dispatcher import Dispatcher, TokenRecorder
from umbra.runtime.rollout.dispatch.router import EngineId, Router
from umbra.runtime.rollout.dispatch.trajectory import Group, Turn
from umbra.runtime.rollout.ledger.recorder import Recorder
from umbra.runtime.rollout.rollout_config import SamplingOptions
from umbra.runtime.text.stop_texts import StopTexts

A, B = EngineId("a", 1), EngineId("b", 1)
STOP = 0


def delta(
    runs: Sequence[tuple[int, int, Sequence[int], int]], finishes: Sequence[tuple[int, str]] = ()
) -> DeltaBatch:
    """A batch of (request id, position, tokens, version) runs."""
    tokens = [token for _, _, run, _ in runs for token in run]
    bounds = np.cumsum([0, *(len(run) for _, _, run, _ in runs)])
    return DeltaBatch.from_wire(
        {
            "ids": np.asarray([run[0] for run in runs], np.int64),
            "positions": np.asarray([run[1] for run in runs], np.int32),
            "offsets": bounds.astype(np.int32),
            "tokens": np.asarray(tokens, np.int32),
            "logprobs": np.full(len(tokens), -1.0, np.float32),
            "versions": np.asarray([run[3] for run in runs], np.int64),
            "finished_ids": np.asarray([finish[0] for finish in finishes], np.int64),
            "finish_reasons": [finish[1] for finish in finishes],
        }
    )


class Inbox:
    """Records what an engine would receive."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.withdrawn: list[int] = []
        self._sent: set[int] = set()

    def send(self, request: dict[str, Any]) -> None:
        self._sent.add(request["id"])
        self.requests.append(request)

    def withdraw(self, request_ids: list[int]) -> None:
        assert self._sent.issuperset(request_ids), "withdrawn before it was sent"
        self.withdrawn += request_ids


class Bench:
    """A dispatcher, its ends and its failures.

    Args:
        stop: texts that end turns; the text of token 1 is "b", of token 2 "c" and so on.
    """

    def __init__(
        self,
        max_inflight: int = 100,
        recorder: TokenRecorder | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.failures: list[UmbraError] = []
        self.ended: dict[str, str] = {}
        self.now = 0.0
        self.told: list[bool] = []
        self.dispatcher = Dispatcher(
            Router(max_inflight, max_inflight),
            self.failures.append,
            recorder or Recorder(None, self.failures.append),
            clock=lambda: self.now,
            on_work=self.told.append,
        )
        if stop:
            self.dispatcher.stop_texts = StopTexts(
                lambda tokens: "".join(chr(97 + token) for token in tokens), stop, 26
            )
        self.inboxes: dict[EngineId, Inbox] = {}

    def serve(self, engine: EngineId) -> Inbox:
        inbox = self.inboxes[engine] = Inbox()
        self.dispatcher.attach(engine, inbox)
        self.dispatcher.set_serving(engine, True)
        return inbox

    def submit(
        self,
        sample_id: str = "s",
        *,
        seed: int = 1,
        budget: int = 20,
        uid: int = -1,
        so_far: Sequence[int] = (),
        group: Group | None = None,
    ) -> Turn:
        sample = make_trajectory([1, 2, 3], sample_id=sample_id, seed=seed, budget=budget)
        sample.uid = uid
        made = np.asarray(so_far, np.int32)
        sample.append_generated(made, np.full(len(made), -1.0, np.float32), 0)

        def on_end(turn: Turn, reason: str) -> None:
            assert turn.trajectory.sample_id not in self.ended, "ended twice"
            self.ended[turn.trajectory.sample_id] = reason

        turn = Turn(
            trajectory=sample,
            group=group,
            start=0,
            limit=budget,
            sampling=SamplingOptions(temperature=1.0, stop_token_ids=[STOP]),
            on_end=on_end,
        )
        self.dispatcher.submit(turn)
        return turn
