"""Tokens and recorded values of chosen samples, from a ledger's history.

`LedgerState` drops the tokens of samples that can no longer change. Here they are read again, for a
few samples only, so that memory does not grow with the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.rollout.ledger.ledger_events import (
    Event,
    PromptGiven,
    Recorded,
    Reset,
    Tokens,
)


class SampleContent:
    """One sample's completion, the prompt of its agent loop if that replaced the data set's, and
    the loop's records, which survive resets."""

    def __init__(self) -> None:
        self.prompt: NDArray[np.int32] | None = None
        self.recorded: dict[str, Any] = {}
        self.tokens: list[int] = []


def read_contents(
    events: Iterable[Event], num_tokens: Mapping[int, int]
) -> dict[int, SampleContent]:
    """The contents of samples at the end of a history that `LedgerState` accepts. `num_tokens` has
    the final number of tokens of each wanted sample, by uid: a rollback or reset after a sample's
    last tokens is known only from it."""
    contents = {uid: SampleContent() for uid in num_tokens}
    wanted = np.asarray(list(num_tokens), np.int64)
    for event in events:
        match event:
            case Tokens():
                for idx in np.flatnonzero(np.isin(event.uids, wanted)).tolist():
                    run = event.tokens[event.offsets[idx] : event.offsets[idx + 1]].tolist()
                    # A start before the end follows a rollback or a reset.
                    contents[int(event.uids[idx])].tokens[int(event.starts[idx]) :] = run
            case PromptGiven(uid=uid) if uid in contents:
                contents[uid].prompt = event.tokens.copy()  # not a view of a whole frame
            case Reset(uid=uid) if uid in contents:
                contents[uid].prompt = None
            case Recorded(uid=uid) if uid in contents:
                contents[uid].recorded[event.key] = event.value
            case _:
                pass
    for uid, content in contents.items():
        del content.tokens[num_tokens[uid] :]
    return contents
