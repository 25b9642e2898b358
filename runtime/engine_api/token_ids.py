from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from umbra.runtime.errors import RequestRefused

_NUM_IDS: Final = 1 << 31  # what int32 holds


def token_ids(
    tokens: Sequence[int] | NDArray[Any], vocab_size: int = 0, what: str = "tokens"
) -> NDArray[np.int32]:
    """[T] int32, without a copy if possible. Raises RequestRefused, naming `what`, for anything but
    integers of the vocabulary."""
    array = _as_array(tokens)
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iuO"):
        raise RequestRefused(
            f"{what}: expected a 1-D sequence of integer token ids, got {_describe(tokens)}"
        )
    problem = wrong_token(array, vocab_size)
    if problem:
        raise RequestRefused(f"{what}: {problem}")
    return array.astype(np.int32, copy=False)


def wrong_token(array: NDArray[Any], vocab_size: int | None) -> str:
    """Describes the first of `array` [T] that the model cannot have, or returns ""."""
    wrong = np.flatnonzero((array < 0) | (array >= (vocab_size or _NUM_IDS)))
    if not wrong.size:
        return ""
    idx = int(wrong[0])
    found = f"token {array[idx]} at index {idx}"
    if not vocab_size:
        return f"{found} is not a token id"
    return f"{found} is outside the model's vocabulary of {vocab_size} (0 to {vocab_size - 1})"


def _describe(tokens: Sequence[int] | NDArray[Any]) -> str:
    if isinstance(tokens, np.ndarray):
        return f"an array of {tokens.dtype} with shape {tokens.shape}"
    kinds = {type(token).__name__ for token in tokens} if isinstance(tokens, list) else set[str]()
    return f"a {type(tokens).__name__}" + (f" of {', '.join(sorted(kinds))}" if kinds else "")


def _as_array(tokens: Sequence[int] | NDArray[Any]) -> NDArray[Any] | None:
    """None if they are not a sequence of numbers; objects for numbers beyond 64 bits."""
    if isinstance(tokens, np.ndarray):
        return tokens
    given = cast("list[object]", list(tokens))
    if not all(issubclass(kind, int | np.integer) for kind in set(map(type, given))):
        return None
    try:
        return np.asarray(given, np.int64)
    except OverflowError:
        return np.asarray(given, object)
