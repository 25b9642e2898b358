"""Appends versions 0, 1, ... and prints which are durable.

`ledger_appender.py FOLDER [PAUSE_S [MAX_FILE_NBYTES]]`; goes on where the ledger ends, until killed
or until it cannot write, and then says why. It pauses after each version that is durable.
"""

from __future__ import annotations

import asyncio
import faulthandler
import resource
import sys
from pathlib import Path

from umbra.runtime.errors import LedgerError
from umbra.runtime.rollout.ledger.ledger_events import Recorded, Version
from umbra.runtime.rollout.ledger.ledger_log import LedgerLog
from umbra.runtime.rollout.ledger.ledger_writer import LedgerWriter


async def append_for_ever(folder: Path, pause_s: float) -> None:
    log = LedgerLog.open(folder, "job", part_nbytes=50_000)
    version = sum(
        isinstance(event, Version)
        for entry in log.history.entries()
        for event in entry.batch.events
    )
    print(version - 1, flush=True)
    async with LedgerWriter(log, flush_s=0.002) as writer:
        while True:
            page = Recorded(0, "page", b"x" * (version * 37 % 900))
            ticket = writer.append(Version(version, 0), page)
            if version % 7 == 0:
                await writer.durable(ticket, 30.0)
                print(version, flush=True)
                await asyncio.sleep(pause_s)
            version += 1


def main() -> int:
    faulthandler.dump_traceback_later(100, exit=True)
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    if len(sys.argv) > 3:
        limit = int(sys.argv[3])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        asyncio.run(append_for_ever(Path(sys.argv[1]), pause_s))
    except LedgerError as error:
        print(error, flush=True)
    return 3


if __name__ == "__main__":
    sys.exit(main())
