"""Foreign engines as actors, made of what the pool's settings say."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Protocol

from umbra.engines.shell.adapter_settings import AdapterSettings
from umbra.engines.shell.engine_core import Core
from umbra.engines.shell.engine_shell import AdapterEngine


class MakeCore(Protocol):
    def __call__(self, settings: Any, /) -> Core: ...


class ConfiguredEngine(AdapterEngine):
    """Takes the fields of its settings by name, which its signature says.

    Attributes:
        settings_class: has these fields.
        core_class: makes the core of them.
    """

    settings_class: ClassVar[type[AdapterSettings]]
    core_class: ClassVar[MakeCore]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        cls.__signature__ = inspect.signature(cls.settings_class)

    def __init__(self, **settings: Any) -> None:
        made = self.settings_class(**settings)
        super().__init__(
            type(self).core_class(made),
            max_num_seqs=made.max_num_seqs,
            max_context_len=made.max_context_len,
            tick_ms=made.tick_ms,
            load_weights=made.load_weights,
        )
