from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.engines.shell.engine_core import PolledCore
from umbra.engines.shell.follower_group import FollowerGroup
from umbra.runtime.engine_api.lora import LoraBase
from umbra.runtime.errors import EngineError


class AdapterCore(PolledCore):
    """The core of an adapter: its library loads weights by itself, mostly in worker processes. If
    the engine spans nodes, the core starts and closes its `followers`.

    Attributes:
        obeys_while_generating: whether workers take orders between two steps, so that they can open
            an update before the engine is paused for it.
    """

    obeys_while_generating: bool = False

    def __init__(self, lora_base: LoraBase | None = None, followers: Sequence[str] = ()) -> None:
        super().__init__(lora_base)
        self.followers = FollowerGroup(followers)

    def show_stacks(self) -> None:
        return

    @abstractmethod
    async def ask_workers(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Makes each worker carry out an order, see `WorkerUpdates.obey`; returns their `checked`
        reports. After "load", requests get the new weights. Raises EngineError if a worker failed:
        after "load" the weights are undefined."""

    def checked(self, reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for worker, report in enumerate(reports):
            if "error" in report:
                raise EngineError(f"{self.name}'s worker {worker} failed: {report['error']}")
        return reports
