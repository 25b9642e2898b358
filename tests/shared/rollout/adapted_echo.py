"""An echo engine that has adapters, for the way of their names: tests of engines have real ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine

CRITIC_SEED = 77
_FOLDERS = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
ADAPTED: dict[str, Any] = {
    "engine": "adapted_echo:AdaptedEcho",
    "env": {"PYTHONPATH": _FOLDERS},
}  # in a PoolSpec


class AdaptedEcho(EchoEngine):
    """With adapter "critic" all draws are those of one seed; "chance" changes nothing."""

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        await super().submit([_adapted(dict(request)) for request in requests])


def _adapted(request: dict[str, Any]) -> dict[str, Any]:
    match request.get("lora"):
        case "critic":
            return request | {"lora": "", "seed": CRITIC_SEED}
        case "chance":
            return request | {"lora": ""}
        case _:
            return request
