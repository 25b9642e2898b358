"""A rollout manager that has a snapshot of its ledger taken after every step."""

from __future__ import annotations

from typing import Any

from umbra.runtime.rollout.ledger.snapshot_taker import SnapshotTaker
from umbra.runtime.rollout.manager.rollout_manager import RolloutManager


class FrequentSnapshots(RolloutManager):
    """It differs from any other in nothing else. Tests that import it keep their own limit, because
    only the manager's process constructs it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        SnapshotTaker.tail_steps = 1
        super().__init__(*args, **kwargs)
