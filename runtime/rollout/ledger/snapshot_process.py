"""Takes a ledger's snapshots: `python -m ... FOLDER KEEP_NBYTES DESCRIPTOR`.

The descriptor is a socket. The process gets a line `POSITION STEPS` for each snapshot, and sends an
empty one when it is done. STEPS are those of the checkpoints, such as `20,40`, or `unknown`. It
also writes the index, so that readers need not, and removes the log's oldest parts
(`ledger_retention.py`). It reads each byte of the log's end once for the snapshots and once for the
index. It ends with the socket's other end, or with an error; its successor reads the last snapshot.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Final

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_history import (
    History,
    Position,
    extend_history,
    read_history,
)
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.ledger_snapshot import (
    LedgerContent,
    first_needed,
    read_content,
    take_snapshot,
)

_EXTRA_PARTS: Final = 2
"""Parts that are removed at once besides as many as were written. More delay the next snapshot;
fewer take longer to remove what a lower limit no longer keeps."""


class SnapshotProcess:
    def __init__(self, folder: Path, keep_nbytes: float) -> None:
        self._folder = folder
        self._keep_nbytes = keep_nbytes
        self._history = History(folder, ())
        self._content: LedgerContent | None = None
        self._index: LedgerIndex | None = None
        self._num_parts = 0

    def take(self, position: Position, checkpoints: list[int] | None) -> None:
        self._history = extend_history(self._history) or read_history(self._folder)
        if not self._history.covers(position):
            end = self._history.end
            raise LedgerError(f"the log ends at {end}: another rollout manager took over")
        history = self._history.until(position)
        taken = take_snapshot(history, checkpoints, self._content)
        content = read_content(history)  # without the samples that were done
        # One of an older snapshot would be taken for the state there: the next take reads it again.
        self._content = content if content.snapshot == taken else None
        if self._index is None:
            self._index, self._num_parts = LedgerIndex(self._folder), len(history.parts)
        self._index.refresh()
        self._index.write()
        max_parts = len(history.parts) - self._num_parts + _EXTRA_PARTS
        self._num_parts = len(history.parts)
        needed = first_needed(history, checkpoints)
        self._index.remove_oldest(self._keep_nbytes, needed, max_parts)


def main(folder: str, keep_nbytes: str, descriptor: str) -> int:
    process = SnapshotProcess(Path(folder), float(keep_nbytes))
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile() as orders:
        for order in orders:
            position, steps = order.split(" ")
            checkpoints = None
            if steps != "unknown\n":
                checkpoints = [int(step) for step in steps.strip().split(",") if step]
            try:
                process.take(Position.parse(position), checkpoints)
            except (LedgerError, OSError) as error:
                print(f"no snapshot, or no index, at {position}: {error}", file=sys.stderr)
                return 1
            connection.sendall(b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
