"""The `umbra` command. Each subcommand's modules are imported only when it is called."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from io import UnsupportedOperation
from typing import Any, Final, TextIO, cast

from umbra.runtime.cli.command_parsers import COMMANDS, command_parsers
from umbra.runtime.errors import ConfigError, DataError, UmbraError
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
    return run_until_unread(partial(_run_reporting_errors, sys.argv[1:] if argv is None else argv))


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
    target = next(command.target for command in COMMANDS if command.name == arguments.command)
    if arguments.command == "generate" and arguments.url:
        target = "umbra.runtime.cli.generate_command:run"
    module, _, function = target.partition(":")
    return int(getattr(import_module(module), function)(arguments))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options may come before, between and after the settings of a command's config."""
    parser, commands = command_parsers()
    if not argv or argv[0] not in commands:
        return parser.parse_args(argv)
    arguments = commands[argv[0]].parse_intermixed_args(argv[1:])
    arguments.command = argv[0]
    return arguments


def run_until_unread(command: Callable[[], int]) -> int:
    """The command's exit status, or 141 if its output was closed before all was written, as in
    `umbra ledger RUN | head`. A pipe that broke elsewhere is an ordinary error."""
    try:
        try:
            return command()
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:  # None if it was closed from the start
                    stream.flush()  # else it fails at the interpreter's end, with a message
    except BrokenPipeError:
        if not any([_discard_unread(sys.stdout), _discard_unread(sys.stderr)]):
            raise
        return _STATUS


def _discard_unread(stream: TextIO | None) -> bool:
    """Whether nobody reads the stream. If so, its unwritten text is discarded."""
    descriptor = _descriptor(stream)
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are always reported
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, descriptor)
    finally:
        os.close(nowhere)
    return True


def _descriptor(stream: TextIO | None) -> int | None:
    """None if it was closed from the start, or captured by this process."""
    try:
        return None if stream is None else stream.fileno()
    except UnsupportedOperation:
        return None


if __name__ == "__main__":
    sys.exit(main())
