"""Turns tokens into text as they come: shows whole characters only, and cuts off stop texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

_REPLACEMENT: Final = "\ufffd"  # decoders return it for bytes that are not (yet) a character


class TextStream:
    """Decodes tokens piece by piece; the joined texts equal decoding all tokens at once.

    Each piece is decoded with the tokens of the piece before it, on which its text may depend (a
    leading space, for example), and held back while it ends in the middle of a character.

    Args:
        decode: returns the text of tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # from the beginning of the last shown piece on
        self._num_shown = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text to show after these tokens; "" if they end within a character."""
        self._tokens += tokens
        return self._advance(may_hold=True)

    def close(self) -> str:
        """The remaining text: bytes that never became a character."""
        return self._advance(may_hold=False)

    def _advance(self, may_hold: bool) -> str:
        shown = self._decode(self._tokens[: self._num_shown])
        text = self._decode(self._tokens)
        if len(text) <= len(shown) or (may_hold and text.endswith(_REPLACEMENT)):
            return ""
        del self._tokens[: self._num_shown]
        self._num_shown = len(self._tokens)
        return text[len(shown) :]


class StopScanner:
    """Passes text through up to the first complete stop; holds back what may begin a stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """The text that is certain to come before any stop."""
        held = self._held + text
        found = [(start + len(s), start) for s in self._stops if (start := held.find(s)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = self._num_held(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def close(self) -> str:
        """Ends the text: what was held back is not a stop."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop."""
        return max((_num_begun(stop, text) for stop in self._stops), default=0)


def _num_begun(stop: str, text: str) -> int:
    """Length of the longest end of `text` that begins `stop`, and is not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
