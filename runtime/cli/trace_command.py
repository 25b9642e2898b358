"""`umbra trace RUN_DIR`: writes a timeline of a run's steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from umbra.runtime.errors import ConfigError
from umbra.runtime.tracing.trace_files import TraceFiles
from umbra.runtime.tracing.trace_json import trace_json, write_trace

_FORMATS: Final = (".json", ".json.gz")


def run(arguments: argparse.Namespace) -> int:
    run_dir, output = Path(arguments.run_dir), arguments.output
    if output and not output.endswith(_FORMATS):
        raise ConfigError(f"-o {output}: end the name with {' or '.join(_FORMATS)}")
    try:
        files = TraceFiles(run_dir)
        events, name = files.events(), "all"
        if arguments.steps:
            first, last = arguments.steps
            events = files.events(files.find_steps(first, last))
            name = f"steps-{first}-{last}"
        path = Path(output or run_dir / "trace" / f"{name}.json.gz")
        write_trace(path, trace_json(events))
    except OSError as error:
        raise ConfigError(f"cannot write a timeline of {run_dir}: {error}") from error
    print(f"{path}: open it at https://ui.perfetto.dev")
    return 0
