"""One weight update of the embedded engine, from begin to commit or abort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from umbra.engines.embedded.parameters import Parameters
from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.memfd import BucketMappings
from umbra.runtime.weights.receive import WeightReceiver


class WeightUpdate:
    """Owns the receiver of the update in progress, if any, and the mapping of the buckets."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._mappings = BucketMappings()
        self._receiver: WeightReceiver | None = None

    def begin(self, manifest: Mapping[str, Any], buckets: Mapping[str, Any]) -> None:
        """Raises WeightSyncError where names, shapes or dtypes are not this model's."""
        self._receiver = WeightReceiver(
            manifest, buckets, self._parameters.destinations, self._mappings
        )

    def load(self) -> dict[str, int]:
        """Blocks until the ranks have sent everything."""
        return {"nbytes": self._open_receiver().load()}

    def stop(self) -> None:
        """Ends a `load` that waits, from another thread."""
        receiver = self._receiver
        if receiver is not None:
            receiver.stop()

    def finish(self, regions: Sequence[Sequence[int | None]]) -> dict[str, Any]:
        return self._open_receiver().finish(regions)

    def commit(self) -> None:
        """Makes what was received the model's weights."""
        self._open_receiver()
        self._parameters.refresh()
        self.abort()

    def abort(self) -> None:
        """Idempotent."""
        self._receiver = None

    def unmap(self) -> None:
        """Gives the buckets' memory back; the next update maps it again."""
        self.abort()
        self._mappings.close()

    def _open_receiver(self) -> WeightReceiver:
        if self._receiver is None:
            raise WeightSyncError("no update is in progress; begin_update comes first")
        return self._receiver
