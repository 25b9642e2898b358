"""Ends a command quietly when nobody reads its output any more, as in `umbra ledger RUN | head`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from io import UnsupportedOperation
from typing import Final, TextIO

_STATUS: Final = 128 + signal.SIGPIPE
"""The status that a shell shows for a program that SIGPIPE ended; Python ignores SIGPIPE."""


def run_until_unread(command: Callable[[], int]) -> int:
    """The command's exit status, or 141 if its output was closed before all was written. A pipe
    that broke elsewhere is an ordinary error."""
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
