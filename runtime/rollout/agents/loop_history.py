"""Records of an agent loop for its later runs: its generations, and values of `ctx.once`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

_TURN_KEY: Final = "turn/"
_ONCE_KEY: Final = "once/"


class TurnRecord(NamedTuple):
    """A completed generation: completion tokens [start, stop) of the trajectory."""

    start: int
    stop: int
    reason: str


class LoopHistory:
    """The records of one trajectory's loop, which outlive its runs."""

    __slots__ = ("num_turn_records", "once", "turns")

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []
        self.num_turn_records = 0  # keys of records are never used twice
        self.once: dict[str, Any] = {}

    @classmethod
    def of_records(cls, records: Mapping[str, Any]) -> Self:
        """Reads the ledger's records, also of turns that a restored checkpoint took back."""
        history = cls()
        for key, value in records.items():
            if key.startswith(_ONCE_KEY):
                history.once[key.removeprefix(_ONCE_KEY)] = value
                continue
            history.num_turn_records += 1
            record = TurnRecord(*value)
            # The later of two records that overlap is of a later run, whose context differed.
            history.turns = [turn for turn in history.turns if turn.stop <= record.start]
            if record.stop > record.start or record.reason:
                history.turns.append(record)
        return history

    def next_turn_key(self) -> str:
        self.num_turn_records += 1
        return f"{_TURN_KEY}{self.num_turn_records}"


def once_key(key: str) -> str:
    return _ONCE_KEY + key
