from __future__ import annotations

import gc
import inspect
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from umbra.engines.shell.adapter_settings import AdapterSettings
from umbra.engines.shell.adapter_updates import AdapterUpdates
from umbra.engines.shell.engine_core import AdapterCore
from umbra.engines.shell.engine_shell import EngineShell
from umbra.engines.shell.polled_requests import PolledRequests
from umbra.engines.shell.warm_up import warm_up
from umbra.runtime.engine_api.hub_snapshot import local_model


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
    __signature__: ClassVar[inspect.Signature]

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
