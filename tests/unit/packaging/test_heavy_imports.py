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
_NEVER_IN_A_SUPERVISOR = _TRAINING_ONLY | {
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "numpy",
    "tempfile",
}
_POOLS_ONLY = {
    "umbra.runtime.engine_api.lifecycle",
    "umbra.runtime.pools.engine_pool",
    "umbra.runtime.weights.sync_messages",
    "umbra.runtime.weights.manifest",
}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("umbra.runtime", _NEVER_IN_A_SUPERVISOR),
        ("umbra.runtime.supervisor.supervisor", _NEVER_IN_A_SUPERVISOR),
        ("umbra.runtime.supervisor.supervisor_main", _NEVER_IN_A_SUPERVISOR | _POOLS_ONLY),
        ("umbra.runtime.actor.actor_host", _NEVER_IN_A_SUPERVISOR),
        ("umbra.runtime.process.guardian", _NEVER_IN_A_SUPERVISOR),
        (
            "umbra.runtime.testing.plugin",
            {"torch", "zmq", "numpy", "msgpack", "uvloop", "pydantic"},
        ),
        ("umbra", _TRAINING_ONLY),
        ("umbra.runtime.session.session", _TRAINING_ONLY),
        ("umbra.runtime.rollout.manager.rollout_manager", _TRAINING_ONLY | {"pydantic"}),
        ("umbra.runtime.rollout.agents.rollout_worker", {"torch", "transformers", "pydantic"}),
        ("umbra.runtime.cli.umbra_command", _TRAINING_ONLY),
        ("umbra.engines.echo.echo_engine", _TRAINING_ONLY),
        ("umbra.engines.embedded.embedded_engine", {"transformers"}),
        ("umbra.trainer.quickstart.quickstart_task", _TRAINING_ONLY),
        ("umbra.trainer.command_line", _TRAINING_ONLY),  # a run is checked before they are loaded
        ("umbra.trainer.config.config_file", {"torch", "transformers", "numpy"}),
        ("umbra.trainer.services.setup_check", {"torch", "transformers"}),
    ],
)
def test_a_process_loads_only_what_it_has_use_for(module: str, forbidden: set[str]) -> None:
    code = _FORBID.format(forbidden=forbidden, module=module)

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 0, done.stderr
