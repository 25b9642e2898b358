"""SGLang as an engine actor, `umbra.engines.sglang.sglang_engine:SglangEngine`.

Sampling follows the requests' seeds only with the option `enable_deterministic_inference`.
"""

from __future__ import annotations

from umbra.engines.sglang.sglang_core import SglangCore
from umbra.engines.sglang.sglang_settings import SglangSettings
from umbra.engines.shell.adapter_engine import ConfiguredEngine


class SglangEngine(ConfiguredEngine):
    settings_class = SglangSettings
    core_class = SglangCore
