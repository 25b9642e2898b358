"""Text of users and libraries, made harmless for a terminal."""

from __future__ import annotations


def escape_unprintable(text: str, *, keep: str = "\n\t") -> str:
    """Replaces control characters and other unprintable ones by Python's escapes, such as `\\x1b`.

    A prompt's id or an exception's message may hold sequences that a terminal obeys.

    Args:
        keep: control characters that stay as they are.
    """
    return "".join(
        char
        if char.isprintable() or char in keep
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
