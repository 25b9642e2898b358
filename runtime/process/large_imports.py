"""Keeps the garbage collector away from the modules of large libraries, which are never garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def large_imports() -> Generator[None]:
    """Import torch, or what may import it, in the block.

    Looking for garbage among the modules of torch takes a sixth of the time of importing it, and
    a third as much again when the interpreter shuts down. Afterwards the collector ignores all
    objects that exist by then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
