"""The core of a foreign engine under the test's control: its calls may wait, or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from umbra.engines.loading.weight_source import Regions
from umbra.engines.shell.adapter_engine import AdapterCore
from umbra.engines.shell.engine_core import NewOutput, Output
from umbra.runtime.engine_api.generation_request import GenerationRequest

VOCAB_SIZE = 97


class ScriptedOutput:
    """All of its tokens at once, when there are any: asked before, it notes that."""

    def __init__(self, num_tokens: int, may_come: asyncio.Event) -> None:
        self._num_tokens = num_tokens
        self.changed = may_come
        self.num_asked = 0

    def take(self) -> NewOutput | None:
        self.num_asked += 1
        if not self.changed.is_set():
            return None
        tokens = [1] * self._num_tokens
        return NewOutput(tokens=tokens, logprobs=[-1.0] * len(tokens), finish_reason="length")


class ScriptedCore(AdapterCore):
    """Notes what it is asked for, once it has done it.

    Attributes:
        may_go_on: cleared, all it is asked for takes until it is set.
        has_begun: set with everything that it is asked for.
        tokens_come: cleared, no request gets a token until it is set.
        regions: what its one worker says that it has read of the ranks' memory.
    """

    name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = VOCAB_SIZE
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.tokens_come = asyncio.Event()
        self.tokens_come.set()
        self.outputs: list[ScriptedOutput] = []
        self.done: list[str] = []
        self.has_begun = asyncio.Event()
        self.regions: Regions = []
        self.orders: list[Mapping[str, Any]] = []

    async def start(self) -> None:
        await self._do("start")

    async def stop(self) -> None:
        self.done.append("stop")

    async def add(
        self, key: str, request: GenerationRequest, cache_salt: str, num_running: int
    ) -> Output:
        await self._do("add")
        self.outputs.append(ScriptedOutput(request.max_new_tokens, self.tokens_come))
        return self.outputs[-1]

    async def abort(self, keys: Iterable[str]) -> None:
        await self._do(f"abort {len(list(keys))}")

    async def pause(self, *, keep: bool) -> None:
        await self._do("pause")
        self.is_paused = True

    async def resume(self) -> None:
        await self._do("resume")
        self.is_paused = False

    async def sleep(self, level: int, tags: Sequence[str]) -> None:
        await self._do(f"sleep {level}")

    async def wake(self, tags: Sequence[str]) -> None:
        await self._do(f"wake {' '.join(tags)}")

    async def ask_workers(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        await self._do(order["action"])
        self.orders.append(order)
        return [{"problem": "", "is_staged": True, "way": "", "regions": self.regions}]

    async def _do(self, what: str) -> None:
        self.has_begun.set()
        await self.may_go_on.wait()
        self.done.append(what)
