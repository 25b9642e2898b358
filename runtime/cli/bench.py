"""`umbra bench rpc|startup|weights|rollout`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from umbra.runtime.errors import ConfigError
from umbra.runtime.process.prctl import become_subreaper
from umbra.runtime.version import umbra_version

_DEFAULT_PEER_PYTHON: Final = Path(".venv-bench/bin/python")
_TRY_TIMEOUT_S: Final = 30.0
_PLAIN_WIDTH: Final = 120
"""Columns of a table that goes to a file or pipe."""


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints: a table, or with `--json` one object and nothing else on stdout.

    Raises:
        ConfigError: the peers' interpreter does not run, or torch is missing for `weights`
            or `rollout`.
    """
    # What a system leaves behind comes to this process, which ends it.
    become_subreaper()
    result = _measure(arguments, _show_progress if sys.stderr.isatty() else _show_nothing)
    if arguments.json:
        print(json.dumps(result))
    else:
        from rich.console import Console

        from umbra.runtime.bench.table import print_result

        console = Console()
        print_result(result, console if console.is_terminal else Console(width=_PLAIN_WIDTH))
    return 1 if result.get("umbra") is None else 0


def _measure(arguments: argparse.Namespace, on_progress: Callable[[str], None]) -> dict[str, Any]:
    match arguments.what:
        case "rpc":
            from umbra.runtime.bench import rpc

            return rpc.run(arguments.rounds, _peer_python(arguments.peer_python), on_progress)
        case "startup":
            from umbra.runtime.bench import startup

            return startup.run(arguments.rounds, _peer_python(arguments.peer_python), on_progress)
        case "weights":
            return _measure_weights(arguments)
        case "rollout":
            return _measure_rollout(arguments, on_progress)
        case _:
            raise AssertionError(arguments.what)


def _measure_weights(arguments: argparse.Namespace) -> dict[str, Any]:
    _require_torch("weights")
    import umbra.runtime.bench.weights as weights
    from umbra.runtime.bench.hardware import describe_hardware

    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("bench weights --device cuda: this machine has no usable CUDA device")
        facts = weights.run_on_gpu(arguments.rounds)
    else:
        facts = weights.run(arguments.rounds, arguments.megabytes * 10**6)
    return {
        "bench": "weights",
        "hardware": describe_hardware(),
        "versions": {"torch": version("torch"), "umbra": umbra_version()},
        "rounds": arguments.rounds,
        **(facts if "umbra" in facts else {"umbra": facts}),
    }


def _measure_rollout(
    arguments: argparse.Namespace, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    _require_torch("rollout")
    import umbra.runtime.bench.rollout as rollout
    from umbra.runtime.bench.hardware import describe_hardware

    hardware = describe_hardware()
    facts = rollout.run(arguments.rounds, arguments.trajectories, arguments.seconds, on_progress)
    packages = ("numpy", "pyzmq", "torch")
    return {
        "bench": "rollout",
        "hardware": hardware,
        "versions": {name: version(name) for name in packages} | {"umbra": umbra_version()},
        "rounds": arguments.rounds,
        "umbra": facts,
    }


def _require_torch(bench: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"bench {bench} needs torch: pip install 'umbra-rl[train]'")


def _peer_python(named: str | None) -> str:
    """Absolute, with its links kept: a virtual environment's interpreter is one."""
    if named is None:
        if not _DEFAULT_PEER_PYTHON.exists():
            return sys.executable
        named = str(_DEFAULT_PEER_PYTHON)
    path = os.path.abspath(named)
    try:
        subprocess.run(
            [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"],
            check=True,
            capture_output=True,
            timeout=_TRY_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"--peer-python {named}: no Python 3.11 or later ({error}); make the peers' "
            "environment with `make bench`, or leave the option out"
        ) from error
    return path


def _show_progress(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show_nothing(text: str) -> None:
    del text
