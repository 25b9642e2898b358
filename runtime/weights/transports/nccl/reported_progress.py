"""The progress of a sync whose ranks and engines share no memory: the supervisor's own numbers.

Ranks report what they have sent (`SyncProgressed`), and the answer tells them whether the sync was
aborted and which engines are lost. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from umbra.runtime.errors import ProtocolError
from umbra.runtime.weights.sync_calls import SyncProgressed


class ReportedProgress:
    """Implements `TransferProgress`. An engine has loaded what every rank has sent to it, except
    for chunks that are on their way."""

    def __init__(self, num_ranks: int, num_engines: int) -> None:
        self.is_aborted = False
        self._filled = [0] * num_ranks
        self._sent: list[Sequence[int]] = [[0] * num_engines for _ in range(num_ranks)]
        self._num_engines = num_engines
        self._dismissed: set[int] = set()

    def observe(self, report: SyncProgressed) -> dict[str, Any]:
        """Returns the answer to a rank: {"is_aborted": bool, "dismissed": [engine, ...]}.

        Raises:
            ProtocolError: it has another number of ranks or engines.
        """
        is_known = 0 <= report.rank < len(self._filled)
        if not is_known or len(report.sent) != self._num_engines:
            raise ProtocolError(
                f"rank {report.rank} reports {len(report.sent)} engines, the sync has "
                f"{len(self._filled)} ranks and {self._num_engines} engines"
            )
        self._filled[report.rank] = report.num_filled
        self._sent[report.rank] = report.sent
        return {"is_aborted": self.is_aborted, "dismissed": sorted(self._dismissed)}

    def num_filled(self) -> list[int]:
        return self._filled

    def num_loaded(self, engine: int) -> int:
        return min(sent[engine] for sent in self._sent)

    def abort(self) -> None:
        self.is_aborted = True

    def dismiss(self, engine: int) -> None:
        self._dismissed.add(engine)
