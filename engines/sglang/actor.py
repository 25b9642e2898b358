"""SGLang as an engine actor: umbra's protocol over its Engine.

Target `umbra.engines.sglang.actor:SglangEngine`. Draws follow the requests' seeds only with the
option `enable_deterministic_inference`.
"""

from __future__ import annotations

from umbra.engines.adapter.configured import ConfiguredEngine
from umbra.engines.sglang.core import SglangCore
from umbra.engines.sglang.settings import SglangSettings


class SglangEngine(ConfiguredEngine):
    """Takes the fields of `SglangSettings`."""

    settings_class = SglangSettings
    core_class = SglangCore
