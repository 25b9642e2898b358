"""`umbra replay` checks what it is asked for, and becomes torchrun with as many ranks as the run
had on these steps:

    torchrun --nproc-per-node N -m umbra.trainer.replay RUN_DIR --steps A:B [section.key=value ...]

Several nodes, or another number of ranks, are started with torchrun itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from umbra.runtime.cli.command_parsers import command_parsers
from umbra.runtime.cluster.environment import TorchrunEnvironment, visible_gpus
from umbra.runtime.disk import writing_output
from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.process.nvml import count_gpus
from umbra.trainer.replay.replay_plan import ReplayPlan
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter

_MODULE = "umbra.trainer.replay"


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks on this node. Does not return unless a check fails."""
    plan = _read_plan(arguments)
    num_gpus = len(visible_gpus(count_gpus()))
    if plan.config.train.device != "cpu" and 0 < num_gpus < plan.num_ranks:
        raise ConfigError(
            f"the run had {plan.num_ranks} ranks on these steps, and this node has {num_gpus} "
            "GPUs: start the replay with torchrun on as many nodes as the run had, "
            f"{_by_torchrun('N', plan)}"
        )
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(plan.num_ranks), "-m", _MODULE, *_own_arguments(plan)]
    with writing_output(plan.config.run.dir):
        try:
            os.execv(sys.executable, [sys.executable, *command])
        except OSError as error:
            raise ConfigError(f"cannot start {sys.executable}: {error.strerror}") from error


def main(argv: Sequence[str]) -> int:
    """One rank's part. Returns the exit status."""
    try:
        environment = TorchrunEnvironment.read()
        _, commands = command_parsers()
        plan = _read_plan(commands["replay"].parse_intermixed_args(argv))
        if plan.is_exact and environment.world_size != plan.num_ranks:
            raise ConfigError(
                f"the run had {plan.num_ranks} ranks on these steps, and this replay has "
                f"{environment.world_size}, which add in another order: start "
                f"{_by_torchrun(plan.num_ranks, plan)}; with settings to change, any number of "
                "ranks may replay"
            )
        from umbra.trainer.replay.replay_run import replay  # with torch

        with ProgressDisplay(sys.stderr if environment.rank == 0 else None) as display:
            replay(plan, environment, display)
    except UmbraError as error:
        FatalErrorReporter(int(os.environ.get("RANK", "0")), 0.0).report(error)
        return 1
    return 0


def _read_plan(arguments: argparse.Namespace) -> ReplayPlan:
    out = None if arguments.output is None else Path(arguments.output)
    return ReplayPlan.read(Path(arguments.run_dir), arguments.steps, arguments.overrides, out)


def _by_torchrun(num_ranks: int | str, plan: ReplayPlan) -> str:
    shown = " ".join(_own_arguments(plan))
    return f"torchrun --nproc-per-node {num_ranks} -m {_MODULE} {shown}"


def _own_arguments(plan: ReplayPlan) -> list[str]:
    steps, out = f"{plan.first}:{plan.last}", str(plan.config.run.dir)
    return [str(plan.run_dir), "--steps", steps, "-o", out, *plan.overrides]
