"""Computes the state at the end of a history."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from umbra.runtime.rollout.ledger.ledger_events import Event, Restored
from umbra.runtime.rollout.ledger.ledger_history import Entry
from umbra.runtime.rollout.ledger.ledger_state import LedgerState
from umbra.runtime.rollout.ledger.sample_accounts import GroupAccount


def replay(
    entries: Callable[[], Iterable[Entry]],
    *,
    restoring_step: int | None = None,
    on_settled: Callable[[GroupAccount], None] | None = None,
    on_event: Callable[[Entry, Event, LedgerState], None] | None = None,
    keeps_tokens: bool = True,
) -> LedgerState:
    """The state at the end of a history, which is read twice: `replay(history.entries)`.

    Args:
        restoring_step: step of the checkpoint that the caller will resume from, if any.
        on_event: called after each event.
        keeps_tokens: as of `LedgerState`.

    Raises:
        LedgerError: the history is damaged or contradicts itself; the position is named.
    """
    restores = [
        event.step
        for entry in entries()
        for event in entry.batch.events
        if isinstance(event, Restored)
    ]
    if restoring_step is not None:
        restores.append(restoring_step)
    state = LedgerState(restores, on_settled=on_settled, keeps_tokens=keeps_tokens)
    state.apply_all(entries(), on_event)
    return state
