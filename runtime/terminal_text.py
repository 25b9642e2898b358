"""Text for terminals: escaped, and durations as people read them."""

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


def format_duration(seconds: float) -> str:
    """`0:52`, `12:07` or `3:25:00`."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
