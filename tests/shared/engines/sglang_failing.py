"""An SGLang whose scheduler fails at the start, as a stand-in: an engine for an actor's process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from model_factory import make_model
from sglang_stand_in import make_modules

from umbra.engines.sglang.sglang_engine import SglangEngine

# Logs as SGLang 0.5.17 does: configure_logger, run_scheduler_process.
_SCHEDULER = """
import logging, traceback
logging.basicConfig(format="[%(asctime)s TP0] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
try:
    raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
except Exception:
    logging.error(f"Scheduler hit an exception: {traceback.format_exc()}")
"""


class FailingEngine:
    def __init__(self, **_kwargs: Any) -> None:
        done = subprocess.run([sys.executable, "-c", _SCHEDULER], check=True)
        raise RuntimeError(
            f"Rank 0 scheduler died during initialization (exit code: {done.returncode}). "
            "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer."
        )

    def shutdown(self) -> None:
        raise AssertionError("it would end all children of this process")


class FailingSglang(SglangEngine):
    def __init__(self, **settings: Any) -> None:
        modules = make_modules(lambda: make_model("qwen3"), 64)
        vars(modules["sglang.srt.entrypoints.engine"])["Engine"] = FailingEngine
        sys.modules.update(modules)
        super().__init__(**settings)
