"""Events and ledgers for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from umbra.runtime.rollout.ledger.ledger_events import (
    Admitted,
    Event,
    Finished,
    Leased,
    Scored,
    Started,
    Tokens,
    Version,
    encode_batches,
    uids_of,
)
from umbra.runtime.rollout.ledger.ledger_history import History, Position, read_history
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_state import LedgerState


def admitted(first_uid: int, name: str, num_samples: int = 2, place: int | None = None) -> Admitted:
    seeds = np.arange(num_samples, dtype=np.int64) + 100
    return Admitted(first_uid, f"e0/{name}", name, 0, first_uid if place is None else place, seeds)


def runs_of(*runs: tuple[int, int, int, Sequence[int]]) -> Tokens:
    """Runs (uid, start, version, tokens); logprobs are the tokens, negative."""
    tokens = [token for *_, run in runs for token in run]
    return Tokens(
        uids_of(*[uid for uid, *_ in runs]),
        uids_of(*[start for _, start, *_ in runs]),
        uids_of(0, *itertools.accumulate(len(run) for *_, run in runs)),
        uids_of(*[version for _, _, version, _ in runs]),
        np.asarray(tokens, np.int32),
        -np.asarray(tokens, np.float32),
    )


def life_of_a_group(first_uid: int, name: str, step: int, version: int) -> list[Event]:
    """Two samples from admission to delivery."""
    uids = uids_of(first_uid, first_uid + 1)
    return [
        admitted(first_uid, name),
        Started(uids),
        runs_of((first_uid, 0, version, [1, 2, 3]), (first_uid + 1, 0, version, [4, 5])),
        Finished(uids, ["stop", "length"]),
        Scored(uids, np.asarray([1.0, 0.0])),
        Leased(step, uids),
    ]


def wire(event: Event) -> bytes:
    """To compare events by."""
    (data,) = encode_batches(0.0, [event])
    return data


def wire_of(state: LedgerState) -> list[bytes]:
    """To compare states by, without what is settled."""
    return [msgpack.packb(item) for item in state.to_wire()]


def write_events(log: LedgerLog, *batches: Sequence[Event]) -> list[Position]:
    """One frame each, as one flush each."""
    return [log.write(encode_batches(10.0 + i, batch)) for i, batch in enumerate(batches)]


def events_in(history: History) -> list[bytes]:
    """All events in their wire form."""
    return [wire(event) for entry in history.entries() for event in entry.batch.events]


def versions_in(folder: Path) -> list[int]:
    """The numbers of all `Version` events: a short summary of a ledger."""
    return [
        event.version
        for entry in read_history(folder).entries()
        for event in entry.batch.events
        if isinstance(event, Version)
    ]


def account_of(sample: Any) -> dict[str, Any]:
    """The public attributes of an account, as plain values."""
    return {
        "state": str(sample.state),
        "tokens": sample.tokens.tolist(),
        "logprobs": sample.logprobs.tolist(),
        "versions": sample.versions.tolist(),
        "reward": sample.reward,
        "step": sample.step,
        "finish_reason": sample.finish_reason,
        "recorded": dict(sample.recorded),
        "interruptions": sample.interruptions,
        "rolled_back": sample.rolled_back,
    }
