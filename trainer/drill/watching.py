"""Waiting for what other processes write, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from umbra.runtime.errors import UmbraError

Found = TypeVar("Found")

_LOOK_AGAIN_S: Final = 0.02
"""Between two looks at a file or at /proc, which tell nobody when they change."""


class DrillError(UmbraError):
    """The drill could not be carried out; says what it waited for."""


def wait_for(what: str, look: Callable[[], Found | None], timeout_s: float) -> Found:
    """The first value of `look` that is not None.

    Raises:
        DrillError: none came in time.
    """
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise DrillError(f"waited {timeout_s:g} s for {what}")
        time.sleep(_LOOK_AGAIN_S)
    return found
