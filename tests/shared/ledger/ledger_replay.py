"""The state at the end of a history that is read from its beginning, without any snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from umbra.runtime.rollout.ledger.ledger_events import Batch, Event, Restored
from umbra.runtime.rollout.ledger.ledger_history import Entry
from umbra.runtime.rollout.ledger.ledger_state import LedgerState


def replay(
    entries: Callable[[], Iterable[Entry]],
    *,
    restoring_step: int | None = None,
    on_event: Callable[[Entry, Event, LedgerState], None] | None = None,
) -> LedgerState:
    """Reads a history twice: `replay(history.entries)`.

    Args:
        restoring_step: step of the checkpoint that the caller will resume from, if any.
        on_event: called after each event.

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
    state = LedgerState()
    state.foresee(restores)
    if on_event is None:
        state.apply_all(entries())
        return state
    for entry in entries():
        for event in entry.batch.events:
            state.apply_all([entry._replace(batch=Batch(entry.batch.time_s, (event,)))])
            on_event(entry, event, state)
    return state
