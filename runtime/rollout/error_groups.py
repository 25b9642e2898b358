"""What went wrong first, out of the exception group that a TaskGroup raises."""

from __future__ import annotations

from typing import cast


def first_leaf(error: BaseException) -> BaseException:
    """The first plain exception in a tree of groups; `error` itself where it is one."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return first_leaf(group.exceptions[0])
    return error
