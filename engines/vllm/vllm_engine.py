"""vLLM as an engine actor, `umbra.engines.vllm.vllm_engine:VllmEngine`.

Draws depend on where a trajectory was cut, so only greedy trajectories resume token for token.
"""

from __future__ import annotations

from umbra.engines.shell.adapter_engine import ConfiguredEngine
from umbra.engines.vllm.vllm_core import VllmCore
from umbra.engines.vllm.vllm_settings import VllmSettings


class VllmEngine(ConfiguredEngine):
    settings_class = VllmSettings
    core_class = VllmCore
