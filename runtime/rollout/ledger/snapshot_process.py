"""Takes one snapshot: `python -m ... FOLDER POSITION STEPS KEEP_NBYTES`.

STEPS are those of the checkpoints, such as `20,40`, or `unknown`. The process reads the ledger as a
starting manager does, while the manager that began it does not wait. It also writes the index, so
that readers need not, and removes the log's oldest parts (`ledger_retention.py`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_history import Position, read_history
from umbra.runtime.rollout.ledger.ledger_index import LedgerIndex
from umbra.runtime.rollout.ledger.ledger_snapshot import first_needed, take_snapshot

_MAX_PARTS: Final = 2
"""Logs removed after each snapshot. More delay the next snapshot; fewer catch up later."""


def main(folder: str, position: str, steps: str, keep_nbytes: str) -> int:
    try:
        history, stop = read_history(Path(folder)), Position.parse(position)
        if not history.covers(stop):
            raise LedgerError(f"the log ends at {history.end}: another rollout manager took over")
        checkpoints = (
            None if steps == "unknown" else [int(step) for step in steps.split(",") if step]
        )
        take_snapshot(history.until(stop), checkpoints)
        os.nice(10)  # readers can wait, and the manager's successor cannot
        index = LedgerIndex(Path(folder))
        index.write()
        needed = first_needed(history, checkpoints)
        index.remove_oldest(float(keep_nbytes), needed, _MAX_PARTS)
    except (LedgerError, OSError) as error:
        print(f"no snapshot, or no index, of the ledger at {position}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
