from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import time
from dataclasses import replace
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from umbra.engines.shell.adapter_settings import AdapterSettings
from umbra.engines.shell.adapter_updates import AdapterCore, AdapterUpdates
from umbra.engines.shell.engine_shell import EngineShell
from umbra.engines.shell.polled_requests import PolledRequests
from umbra.runtime.engine_api.generation_request import GenerationRequest
from umbra.runtime.engine_api.hub_snapshot import local_model
from umbra.runtime.errors import EngineError
from umbra.runtime.waiting import first_of

logger = logging.getLogger(__name__)

_REPORT_AFTER_S: Final = 60.0  # without the end of the warm-up
# The warm-up's request.
_REQUEST: Final = GenerationRequest(
    id=0,
    tokens=np.zeros(1, np.int32),
    position=0,
    seed=0,
    max_new_tokens=2,  # one by prefill, one by decoding
    temperature=1.0,
    stop_token_ids=(),
)


class AdapterEngine(EngineShell[AdapterCore]):
    def __init__(
        self,
        core: AdapterCore,
        *,
        max_num_seqs: int,
        max_context_len: int,
        tick_ms: float,
        load_weights: bool,
    ) -> None:
        super().__init__(
            core,
            PolledRequests(core, max_num_seqs=max_num_seqs, tick_ms=tick_ms),
            AdapterUpdates(core),
            max_context_len=max_context_len,
            load_weights=load_weights,
        )

    async def _start_core(self) -> None:
        await super()._start_core()
        await warm_up(self._core)
        # The library's objects stay. Each search for garbage among them would stop the event loop
        # for up to half a second.
        gc.collect()
        gc.freeze()


class MakeCore(Protocol):
    def __call__(self, settings: Any, /) -> AdapterCore: ...


class ConfiguredEngine(AdapterEngine):
    """An adapter that accepts the fields of `settings_class` by name."""

    settings_class: ClassVar[type[AdapterSettings]]
    core_class: ClassVar[MakeCore]

    def __init_subclass__(cls) -> None:
        cls.__signature__ = inspect.signature(cls.settings_class)

    def __init__(self, **settings: Any) -> None:
        made = self.settings_class(**settings)
        folder = local_model(made.model_path, with_weights=made.reads_weights)
        made = replace(made, model_path=folder)
        super().__init__(
            type(self).core_class(made),
            max_num_seqs=made.max_num_seqs,
            max_context_len=made.max_context_len,
            tick_ms=made.tick_ms,
            load_weights=made.load_weights,
        )


async def warm_up(core: AdapterCore) -> None:
    """Runs a two-token request before the engine reports ready, so that it compiles during its
    start. Compiling takes many seconds with vLLM on the CPU. From then on, callers and the stall
    watchdog can expect tokens promptly. The start's own deadline applies."""
    started = time.monotonic()
    output = await core.add("warm-up", _REQUEST, "warm-up", 1)
    while True:
        try:
            new = output.take()
        except Exception as error:  # of the engine's library; the log has the cause
            raise EngineError(f"{core.name} failed at its first request: {error}") from error
        if new is not None and new.finish_reason is not None:
            break
        if core.died.is_set():
            raise EngineError(f"a process of {core.name} ended at its first request")
        try:
            async with asyncio.timeout(_REPORT_AFTER_S):
                await first_of(output.changed, core.died)
        except TimeoutError:
            took_s = time.monotonic() - started
            logger.warning("%s has not ended its first request in %.0f s", core.name, took_s)
            core.show_stacks()
    if new.finish_reason != "length":
        raise EngineError(f"{core.name} ended its first request: {new.finish_reason}")
