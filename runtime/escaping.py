"""Escapes text of users and libraries, so that it is harmless for a terminal."""

from __future__ import annotations


def escape_unprintable(text: str, *, keep: str = "\n\t") -> str:
    """Replaces control characters and other unprintable ones by Python's escapes, for example
    `\\x1b`.

    A prompt's id or an exception's message may hold sequences that would control a terminal.

    Args:
        keep: control characters that stay as they are.
    """
    return "".join(
        char
        if char.isprintable() or char in keep
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
