"""Who imports what: heavy packages stay out of processes that have no use for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FORBID = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if not {forbidden!r}.isdisjoint((name, name.partition(".")[0])):
            raise ImportError(f"{{name}} must not be imported here")
        return None
sys.meta_path.insert(0, Refuse())
import {module}
"""

_TRAINING_ONLY = {"torch", "transformers", "tokenizers", "safetensors", "matplotlib", "pyarrow"}
_SLOW_TO_IMPORT = {"pydantic", "pydantic_core", "annotated_types", "numpy", "tempfile"}


_POOLS_ONLY = {
    "umbra.runtime.engine_api.lifecycle",
    "umbra.runtime.pools.node_pools",
    "umbra.runtime.weights.sync_messages",
    "umbra.runtime.weights.manifest",
}


def import_without(module: str, forbidden: set[str]) -> None:
    code = _FORBID.format(forbidden=forbidden, module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "umbra.runtime",
        "umbra.runtime.supervisor.supervisor",
        "umbra.runtime.supervisor.supervisor_main",
        "umbra.runtime.actor.actor_host",
        "umbra.runtime.process.guardian",
    ],
)
def test_a_supervisor_loads_neither_torch_nor_pydantic_nor_numpy(module: str) -> None:
    import_without(module, _SLOW_TO_IMPORT | _TRAINING_ONLY)


def test_a_supervisor_without_pools_loads_nothing_of_them() -> None:
    import_without("umbra.runtime.supervisor.supervisor_main", _POOLS_ONLY)


@pytest.mark.parametrize(
    "module",
    [
        "umbra",
        "umbra.runtime.session.session",
        "umbra.runtime.rollout.manager.rollout_manager",
        "umbra.runtime.cli.umbra_command",
        "umbra.engines.echo.echo_engine",
        "umbra.trainer.quickstart.quickstart_task",
    ],
)
def test_the_core_works_without_the_training_extra(module: str) -> None:
    import_without(module, _TRAINING_ONLY)


def test_a_rollout_worker_loads_no_torch() -> None:
    import_without("umbra.runtime.rollout.agents.rollout_worker", {"torch", "transformers"})


def test_a_run_is_checked_before_the_training_extra_is_loaded() -> None:
    import_without("umbra.trainer.command_line", _TRAINING_ONLY)
