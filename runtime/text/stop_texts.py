from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MAX_TOKENS_OF_CHARACTER: Final = 4
_NUM_CONTEXT_TOKENS: Final = 8
"""Tokens decoded in front of a stop. Fewer may change its text; more search longer."""
_REPLACEMENT: Final = "\ufffd"  # decoders return it for bytes that are not a character


class StopTexts:
    """Finds the token that completes a stop text, however the tokens are cut into runs. Few tokens
    can complete a stop. They are found beforehand, by `decode` of each token of the vocabulary, so
    that other tokens need no text."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], texts: Sequence[str], vocab_size: int
    ) -> None:
        self._decode = decode
        self._texts = texts
        longest = max(map(len, texts))
        self._num_before = _MAX_TOKENS_OF_CHARACTER * longest + _NUM_CONTEXT_TOKENS
        ends = tuple({text[start:] for text in texts for start in range(len(text))})
        self._may_complete = np.asarray(
            [self._could_complete(decode([token]), ends) for token in range(vocab_size)]
        )

    def _could_complete(self, text: str, ends: tuple[str, ...]) -> bool:
        """Whether a stop may end in a token of this text, to which its decoder may add a space."""
        return (
            text.startswith(ends)
            or f" {text}".startswith(ends)
            or _REPLACEMENT in text
            or any(stop in text for stop in self._texts)
        )

    def may_complete(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The tokens among these that could complete a stop, whatever comes before them."""
        return self._may_complete.take(tokens, mode="clip")  # ids beyond have no text

    def num_until_stop(self, before: NDArray[np.int32], tokens: NDArray[np.int32]) -> int:
        """How many of these tokens, after `before`, end with the first complete stop; 0 if none."""
        known: list[int] = [*before[-self._num_before :].tolist(), *tokens.tolist()]
        if not self._has_stop(known):
            return 0
        num_before = len(known) - len(tokens)
        return 1 + bisect_left(
            range(1, len(tokens)), True, key=lambda num: self._has_stop(known[: num_before + num])
        )

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        text = self._decode(tokens)
        return any(stop in text for stop in self._texts)
