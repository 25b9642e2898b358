"""The history of one sample, in words, from the events of its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from umbra.runtime.rollout.ledger.ledger_events import (
    GIVEN,
    Admitted,
    Batch,
    Checkpoint,
    Cut,
    Dropped,
    Event,
    Finished,
    Leased,
    PromptGiven,
    Recorded,
    Reset,
    Restored,
    Scored,
    Started,
    Tokens,
    Version,
)


def story_of(
    uid: int, batches: Iterable[Batch], versions: Mapping[int, int]
) -> list[dict[str, Any]]:
    """The time, name and details of each event of a sample, oldest first, from its admission on."""
    story = _Story(uid, versions)
    for batch in batches:
        for event in batch.events:
            story.follow(event, batch.time_s)
    story.end_run()
    return story.rows


class _Story:
    def __init__(self, uid: int, versions: Mapping[int, int]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._uid = uid
        self._versions = versions
        self._step: int | None = None  # the step that it is leased for
        self._is_trained = False
        self._runs: list[tuple[float, int, int, int]] = []  # (time, start, stop, version)
        self._num_told = 0  # number of runs already noted

    def follow(self, event: Event, time_s: float) -> None:
        uids = getattr(event, "uids", None)
        idx = 0
        if isinstance(event, Admitted):
            if not event.first_uid <= self._uid < event.first_uid + len(event.seeds):
                return
        elif uids is not None:
            found = np.flatnonzero(uids == self._uid).tolist()
            if not found:
                return
            (idx, *_) = found
            if isinstance(event, Tokens):
                for idx in found:
                    self._add_run(event, idx, time_s)
                return
        elif getattr(event, "uid", self._uid) != self._uid:
            return
        match event:
            case Admitted():
                self._note(time_s, "admitted", f"index {event.order_idx} in the data")
            case Started():
                self._note(time_s, "started", "")
            case Cut():
                self._note(time_s, "cut", event.reason)
            case PromptGiven():
                self._note(time_s, "prompt", f"of {len(event.tokens)} tokens")
            case Recorded():
                self._note(time_s, "recorded", event.key)
            case Reset():
                self._note(time_s, "reset", event.reason)
                self._runs.clear()
                self._num_told = 0
            case Finished():
                self._note(time_s, "finished", event.reasons[idx])
            case Scored():
                self._note(time_s, "scored", f"reward {event.rewards[idx]:g}")
            case Leased():
                self._step, self._is_trained = event.step, False
                self._note(time_s, "leased", f"for step {event.step + 1}")
            case Dropped():
                detail = ": ".join(filter(None, (event.reason, event.cause)))
                self._note(time_s, "dropped", detail)
            case Version() | Checkpoint():
                if self._step is not None and not self._is_trained and self._step < event.step:
                    self._is_trained = True
                    self._note(time_s, "trained", f"in step {self._step + 1}")
            case Restored():
                self._restore(event, time_s)
            case _:
                pass

    def end_run(self) -> None:
        """Notes consecutive runs of one version as one."""
        runs = self._runs[self._num_told :]
        self._num_told = len(self._runs)
        if runs:
            version = runs[0][3]
            source = "given" if version == GIVEN else f"version {version}"
            lasted_s = runs[-1][0] - runs[0][0]
            detail = f"{runs[0][1]} to {runs[-1][2]}, {source}, in {lasted_s:.3f} s"
            self.rows.append({"time_s": runs[0][0], "event": "tokens", "detail": detail})

    def _add_run(self, event: Tokens, idx: int, time_s: float) -> None:
        start, version = int(event.starts[idx]), int(event.versions[idx])
        length = int(event.offsets[idx + 1] - event.offsets[idx])
        if self._num_told < len(self._runs) and self._runs[-1][3] != version:
            self.end_run()
        self._runs.append((time_s, start, start + length, version))

    def _restore(self, event: Restored, time_s: float) -> None:
        if self._step is not None and self._step >= event.step:
            self._step = None
            self._note(time_s, "restored", f"not trained up to step {event.step}")
        if self._step is None:
            newer = [run for run in self._runs if self._versions.get(run[3], 0) > event.step]
            if newer:
                num_lost = self._runs[-1][2] - newer[0][1]
                self._note(time_s, "rolled_back", f"{num_lost} tokens of later versions cut off")
                del self._runs[self._runs.index(newer[0]) :]
                self._num_told = len(self._runs)

    def _note(self, time_s: float, event: str, detail: str) -> None:
        self.end_run()
        self.rows.append({"time_s": time_s, "event": event, "detail": detail})
