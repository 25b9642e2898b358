"""Finds the token that completes a stop text, in runs of tokens as they come."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

_MAX_TOKENS_OF_CHARACTER: Final = 4
"""The most tokens that a character is split over, one for each byte of UTF-8."""
_NUM_CONTEXT_TOKENS: Final = 8
"""Tokens in front of a stop that are decoded with it, because a token's text may depend on them.
More make each run slower."""


class StopFinder:
    """Gives the same answer however the tokens are cut into runs.

    Args:
        decode: returns the text of tokens.
        stops: at least one; none is empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = stops
        longest = max(map(len, stops))
        self._num_kept = _MAX_TOKENS_OF_CHARACTER * longest + _NUM_CONTEXT_TOKENS
        self._last: Sequence[int] = ()  # tokens in which a stop may have begun

    def num_until_stop(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, which continue those of earlier calls, end with the first
        complete stop; 0 if none is complete."""
        num_before, known = len(self._last), [*self._last, *tokens]
        if not self._has_stop(known):
            self._last = known[-self._num_kept :]
            return 0
        return 1 + bisect_left(
            range(1, len(tokens)), True, key=lambda num: self._has_stop(known[: num_before + num])
        )

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._stops)
