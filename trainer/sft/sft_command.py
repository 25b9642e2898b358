"""`torchrun --nproc-per-node N -m umbra.trainer.sft CONFIG.toml [section.key=value ...]`."""

from __future__ import annotations

import gc
import sys
import time
from typing import Final

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ConfigError, UmbraError
from umbra.runtime.settings import annotations_of
from umbra.runtime.text.model_files import default_context_len, read_model_config
from umbra.trainer.checkpoint.run_dir import check_kind, check_run_dir, process_age_s
from umbra.trainer.command_line import (
    GRACE_S,
    MAX_WAIT_FOR_OTHERS_S,
    configure_logging,
    parse_arguments,
    run_lock,
)
from umbra.trainer.config.config_file import read_config
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.data.data_rows import check_data_file
from umbra.trainer.data.hub_paths import with_local_paths
from umbra.trainer.data.sft_rows import SftRows
from umbra.trainer.reporting.console import Console, ProgressDisplay
from umbra.trainer.reporting.fatal_error_report import FatalErrorReporter
from umbra.trainer.reporting.metrics_loggers import check_loggers
from umbra.trainer.services.setup_check import check_lora, check_model, check_restarts
from umbra.trainer.world.signals import StopSignals

_DESCRIPTION: Final = "Fine-tune a model on given answers; start it with torchrun."


def main(console: Console) -> None:
    """Runs one rank; exits with 0, with 1 after an error, or as a signal asks (`stop_status`)."""
    sections = list(annotations_of(SftConfig))
    arguments = parse_arguments("umbra.trainer.sft", _DESCRIPTION, sections)
    fatal_errors = FatalErrorReporter(-1, 0.0)
    try:
        environment = TorchrunEnvironment.read()
        fatal_errors = FatalErrorReporter(environment.rank, GRACE_S)
        configure_logging(environment.rank)
        try:
            config = _read(arguments.config, arguments.overrides, environment)
        except UmbraError as error:
            fatal_errors.report(error)
            if environment.world_size > 1:  # see `umbra.trainer.command_line`
                time.sleep(min(process_age_s(), MAX_WAIT_FOR_OTHERS_S))
            raise
        code = _run(config, environment, fatal_errors)
    except UmbraError as error:
        fatal_errors.report(error)
        code = 1
    sys.exit(code)


def _read(path: str, overrides: list[str], environment: TorchrunEnvironment) -> SftConfig:
    config = read_config(SftConfig, path, overrides)
    config = config.with_paths_of(with_local_paths(config.as_trainer_config(), environment))
    check_sft_setup(config, environment)
    return config


def check_sft_setup(config: SftConfig, environment: TorchrunEnvironment) -> None:
    """Checks files and the number of ranks before anything is started, on every rank. Raises
    ConfigError, DataError or RunDirectoryError."""
    model_path, batch_size = config.model.path, config.sft.batch_size
    limit = read_model_config(model_path).get("max_position_embeddings")
    max_len = config.sft.max_len or default_context_len(model_path)
    if isinstance(limit, int) and max_len > limit:
        raise ConfigError(
            f"sft.max_len = {max_len} exceeds the model's max_position_embeddings = {limit}: lower "
            "it to that or less"
        )
    check_model("model.path", model_path)
    check_lora(config.model)
    if batch_size < environment.world_size:
        raise ConfigError(
            f"sft.batch_size = {batch_size} for {environment.world_size} ranks; every rank needs a "
            f"row: raise it, or start {batch_size} ranks or fewer"
        )
    rows = SftRows(data=config.data, sft=config.sft, max_len=max_len)
    for paths, key in (
        (config.data.train_files, "data.train"),
        (config.data.eval_files, "data.eval"),
    ):
        for path in paths:
            check_data_file(path, key)
            rows.check(path, key)
    check_loggers(config.run.loggers)
    check_run_dir(config.run, environment.incarnation)
    check_kind(config)
    check_restarts(config.run, environment)


def _run(
    config: SftConfig, environment: TorchrunEnvironment, fatal_errors: FatalErrorReporter
) -> int:
    display = ProgressDisplay(sys.stderr if environment.rank == 0 else None)
    with (
        fatal_errors,
        display,
        run_lock(config.run.dir, environment),
        StopSignals(GRACE_S, fatal_errors.stopped) as stop,
    ):
        try:
            gc.disable()  # looking for garbage among torch's modules takes a sixth of the time
            with stop.importing(), display.activity("importing torch"):
                from umbra.trainer.sft.sft_run import SftRun

            gc.freeze()  # they never become garbage
            gc.enable()
            with SftRun(config, environment, stop, display).open() as run:
                run.train()
        except UmbraError as error:
            fatal_errors.report(error)
            raise
        return stop.exit_status
