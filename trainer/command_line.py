"""`torchrun --nproc-per-node N -m umbra.trainer CONFIG.toml [section.key=value ...]`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from umbra.runtime.cluster.environment import TorchrunEnvironment, log_level
from umbra.runtime.cluster.job_nodes import failure_reported
from umbra.runtime.errors import UmbraError
from umbra.runtime.session.launch import SessionConfig
from umbra.runtime.session.session import Session
from umbra.runtime.settings import annotations_of
from umbra.trainer.checkpoint.run_dir import RunLock, process_age_s
from umbra.trainer.config.config_file import load_config
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.hub_paths import with_local_paths
from umbra.trainer.reporting.console import Console, ProgressDisplay
from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter
from umbra.trainer.services.chosen_settings import (
    settings_left_open,
    with_choices,
    with_chosen_settings,
)
from umbra.trainer.services.services import ServiceStarter
from umbra.trainer.services.setup_check import check_setup
from umbra.trainer.world.signals import StopSignals

MAX_WAIT_FOR_OTHERS_S: Final = 5.0
# From a failure to the end of this rank where torchrun then starts all ranks again: it may be in a
# collective with a lost node. Longer delays that start; shorter cuts off the last lines of loggers.
_LOST_JOB_LIMIT_S: Final = 0.5
# From a signal or the job's failure to the end of a rank that has nothing to save or cannot react.
GRACE_S: Final = 5.0
# For the lock of a lost node's rank 0 to be free. Other nodes wait 60 s for this one.
_LOST_LOCK_LIMIT_S: Final = 40.0
_DESCRIPTION: Final = "Train a model by RL as configured in a TOML file; start it with torchrun."
_LIBRARIES: Final = ("torch", "transformers", "matplotlib", "tensorboard")


def main(console: Console) -> None:
    """Runs one rank; exits with 0, with 1 after an error, or as a signal asks (`stop_status`)."""
    sections = list(annotations_of(TrainerConfig))
    arguments = parse_arguments("umbra.trainer", _DESCRIPTION, sections)
    fatal_errors = FatalErrorReporter(-1, 0.0)
    try:
        environment = TorchrunEnvironment.read()
        fatal_errors = FatalErrorReporter(environment.rank, 0.0)
        configure_logging(environment.rank)
        config, chosen = _read_settings(arguments, environment, fatal_errors)
        is_elastic = environment.nodes_may_change
        limit_s = _LOST_JOB_LIMIT_S if is_elastic else GRACE_S
        fatal_errors = FatalErrorReporter(environment.rank, limit_s)
        code = _run(config, chosen, environment, fatal_errors, console)
    except UmbraError as error:
        fatal_errors.report(error)
        code = 1
    sys.exit(code)


def _read_settings(
    arguments: argparse.Namespace,
    environment: TorchrunEnvironment,
    fatal_errors: FatalErrorReporter,
) -> tuple[TrainerConfig, str]:
    """The config, and a line about what was chosen for this machine. Rank 0's choices count for
    all: on other nodes, a config that leaves anything open is returned as it was read."""
    try:
        with failure_reported(environment):
            config = load_config(arguments.config, arguments.overrides)
            config, chosen = with_local_paths(config, environment), ""
            if environment.node_rank == 0:
                config, chosen = with_chosen_settings(config)
            if "auto" not in settings_left_open(config).values():
                check_setup(config, environment)
    except UmbraError as error:
        fatal_errors.report(error)
        if environment.world_size > 1:
            # The others are about to find the same error, unless torchrun ends them because this
            # rank exits. They started together, so they need about as long on a busy machine.
            time.sleep(min(process_age_s(), MAX_WAIT_FOR_OTHERS_S))
        raise
    return config, chosen


def run_program(main: Callable[[Console], None]) -> NoReturn:
    """Runs `main` as a process of its own, which exits at once afterwards: with torch loaded, the
    interpreter takes a second of processor time to shut down, much of a signal's grace period."""
    code = 0
    try:
        main(Console.install())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(
    config: TrainerConfig,
    chosen: str,
    environment: TorchrunEnvironment,
    fatal_errors: FatalErrorReporter,
    console: Console,
) -> int:
    display = ProgressDisplay(sys.stderr if environment.rank == 0 else None)
    settings = SessionConfig(
        run_dir=config.run.dir,
        shutdown_grace_s=GRACE_S,
        trace=config.run.trace,
        choices=settings_left_open(config),
    )
    with (
        fatal_errors,
        display,
        run_lock(config.run.dir, environment),
        StopSignals(GRACE_S, fatal_errors.stopped) as stop,
        Session.from_torchrun(
            settings,
            on_note=display.note,
            on_failed=fatal_errors.job_failed,
            on_signal=stop.pass_in,
        ) as session,
        contextlib.ExitStack() as stack,
    ):
        console.log_losses(session.log_dir / "supervisor.log", name=f"rank {environment.rank}")
        if chosen:
            display.note(chosen)
        try:
            if "auto" in settings_left_open(config).values():
                config = with_choices(config, session.nodes[0].choices)
                check_setup(config, environment)
            starter: ServiceStarter | None = None
            if environment.rank == 0:
                starter = stack.enter_context(ServiceStarter.open(session, config, display))
            # Imports torch, while the supervisor and the rollout workers start.
            gc.disable()  # looking for garbage among torch's modules takes a sixth of the time
            with stop.importing(), display.activity("importing torch"):
                from umbra.trainer.run_parts import TrainingRun
                from umbra.trainer.train import train

            gc.freeze()  # they never become garbage
            gc.enable()
            run = TrainingRun(config, session, environment, stop, display, fatal_errors, starter)
            with run.open():
                train(run)
        except UmbraError as error:
            fatal_errors.report(error)
            raise
        return stop.exit_status


def run_lock(
    run_dir: Path, environment: TorchrunEnvironment
) -> contextlib.AbstractContextManager[object]:
    """Rank 0's lock of the run directory."""
    if environment.rank != 0:
        return contextlib.nullcontext()
    with failure_reported(environment), contextlib.ExitStack() as stack:
        within_s = _LOST_LOCK_LIMIT_S if environment.nodes_may_change else 0.0
        stack.enter_context(RunLock(run_dir, within_s))
        return stack.pop_all()


def configure_logging(rank: int) -> None:
    logging.basicConfig(
        level=log_level(), format=f"%(asctime)s rank {rank} %(name)s %(levelname)s: %(message)s"
    )
    # At INFO, libraries log what matters to their authors only.
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def parse_arguments(module: str, description: str, sections: Sequence[str]) -> argparse.Namespace:
    """`config` and `overrides` of the command line of a training."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog="Sections: " + ", ".join(f"[{name}]" for name in sections),
    )
    parser.add_argument("config", help="the TOML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings to change; an empty value unsets one",
    )
    return parser.parse_args()
