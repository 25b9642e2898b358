from __future__ import annotations


def format_duration(seconds: float) -> str:
    """`0:52`, `12:07` or `3:25:00`."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
