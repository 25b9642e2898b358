"""An engine that starts only where a file exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from umbra.engines.echo.echo_engine import EchoEngine


class NeedyEngine(EchoEngine):
    def __init__(self, needs: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        Path(needs).read_bytes()
