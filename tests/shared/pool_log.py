"""Checks time-slicing with a supervisor's log (UMBRA_LOG_LEVEL=DEBUG)."""

from __future__ import annotations

import re
from pathlib import Path


def assert_never_both_awake(log: Path, pools: tuple[str, ...] = ("policy", "judge")) -> None:
    """Asserts it from the supervisor's log, which has all states of engines in order."""
    awake: dict[str, set[str]] = {pool: set() for pool in pools}
    one_of = "|".join(map(re.escape, pools))
    event = re.compile(rf"\b(({one_of})-\d+)#\d+ (has freed its memory|is (\w+))")
    num_events = 0
    for line in log.read_text().splitlines():
        found = event.search(line)
        if found is None:
            continue
        engine, pool, what, state = found.groups()
        num_events += 1
        if what == "has freed its memory" or state == "DEAD":
            awake[pool].discard(engine)
        elif state != "ASLEEP":
            awake[pool].add(engine)
        assert sum(map(bool, awake.values())) <= 1, line
    assert num_events > 4
