"""A reward that leaves something behind: a folder beside the run's socket folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from umbra.runtime.cluster.environment import socket_root


def reward(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    Path(socket_root(), "left-behind").mkdir(exist_ok=True)
    return [0.0] * len(completions)
