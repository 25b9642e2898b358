"""The short names of umbra's own engines, and their actor targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ENGINE_TARGETS: Final[Mapping[str, str]] = {
    "embedded": "umbra.engines.embedded.embedded_engine:EmbeddedEngine",
    "vllm": "umbra.engines.vllm.vllm_engine:VllmEngine",
    "sglang": "umbra.engines.sglang.sglang_engine:SglangEngine",
    "echo": "umbra.engines.echo.echo_engine:EchoEngine",
    "faulty": "umbra.engines.faulty.faulty_engine:FaultyEngine",
}


def engine_target(engine: str) -> str:
    """The `module:Class` of an engine given by its short name or as `module:Class`."""
    return ENGINE_TARGETS.get(engine, engine)
