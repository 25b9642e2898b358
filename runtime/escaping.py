from __future__ import annotations


def escape_unprintable(text: str, *, keep: str = "\n\t") -> str:
    """Replaces control characters but `keep`, and other unprintable ones, by Python's escapes. A
    prompt's id or an exception's message may hold sequences that would control a terminal."""
    return "".join(
        char
        if char.isprintable() or char in keep
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
