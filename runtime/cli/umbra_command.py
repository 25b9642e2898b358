"""The `umbra` command. Each subcommand's modules are imported only when it is called."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, Final, TextIO, cast

from umbra.runtime.cli.command_parsers import COMMANDS, command_parsers
from umbra.runtime.errors import ConfigError, DataError, UmbraError, how_to_install
from umbra.runtime.reports.run_metrics import recorded_setting
from umbra.runtime.terminal_text import escape_unprintable

_STATUS: Final = 128 + signal.SIGPIPE
"""The status that a shell shows for a program that SIGPIPE ended; Python ignores SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. The exit status is 2 for wrong use, 1 for a failure, 130 for Ctrl-C,
    and 141 if the reader of the output closed it, for example `head`: the status of a program
    that SIGPIPE ended."""
    with contextlib.suppress(AttributeError):  # it was closed from the start, or is captured
        # As stderr: a terminal of another encoding cannot show all characters of a run's texts.
        cast("Any", sys.stdout).reconfigure(errors="backslashreplace")
    try:
        try:
            return _run_reporting_errors(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout is not None:  # None if it was closed from the start
                sys.stdout.flush()
    except BrokenPipeError:
        unread = [fd for stream in (sys.stdout, sys.stderr) for fd in _unread(stream)]
        if not unread:  # another pipe, of the command itself
            raise
        with open(os.devnull, "wb") as nowhere:
            for descriptor in unread:  # whose last flush would fail, with a message
                os.dup2(nowhere.fileno(), descriptor)
        return _STATUS


def _unread(stream: TextIO | None) -> list[int]:
    """The descriptor of a stream that nobody reads any more; else nothing."""
    try:
        descriptor = -1 if stream is None else stream.fileno()  # None if closed from the start
    except UnsupportedOperation:  # captured by this process
        return []
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are always reported
    return [descriptor] if descriptor >= 0 and poll.poll(0) else []


def _run_reporting_errors(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    try:
        return _run(arguments)
    except UmbraError as error:
        print(f"umbra: {escape_unprintable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except BrokenPipeError:  # of the output, perhaps
        raise
    except OSError as error:
        cause = error.strerror or str(error)
        text = f"cannot use {error.filename}: {cause}" if error.filename else cause
        print(f"umbra: {escape_unprintable(text)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("umbra: interrupted", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    # By name, because nothing here imports the trainer.
    command = next(command for command in COMMANDS if command.name == arguments.command)
    if "run_dir" in arguments:
        _check_run_dir(Path(arguments.run_dir), command.sft_lacks)
    module_name, _, function = command.target.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError(
            f"umbra {arguments.command} needs aiohttp: {how_to_install('serve')}"
        ) from error
    return int(getattr(module, function)(arguments))


def _check_run_dir(run_dir: Path, sft_lacks: str) -> None:
    if not run_dir.is_dir():
        raise ConfigError(
            f"there is no folder {run_dir}: give the one that the job's config calls run.dir"
        )
    if sft_lacks and recorded_setting(run_dir, "sft", "batch_size") is not None:
        raise ConfigError(f"{run_dir} is a run of SFT, which has no {sft_lacks}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options may come before, between and after the settings of a command's config."""
    parser, commands = command_parsers()
    if not argv:
        parser.exit(2, parser.format_help())
    if not argv or argv[0] not in commands:
        return parser.parse_args(argv)
    arguments = commands[argv[0]].parse_intermixed_args(argv[1:])
    arguments.command = argv[0]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
