"""A generation request to an engine. Torch-free. T: its tokens, the prompt's and generated ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from umbra.runtime.errors import RequestRefused

Int32Array = npt.NDArray[np.int32]

REQUEST_KEYS: Final = frozenset(
    {
        "id",
        "tokens",
        "position",
        "seed",
        "max_new_tokens",
        "temperature",
        "stop_token_ids",
    }
)
OPTIONAL_KEYS: Final = frozenset({"lora", "top_p", "top_k"})

MIN_TEMPERATURE: Final = 1e-4
# Below this, logits divided by the temperature can exceed the range of float32.

_NUM_IDS: Final = 1 << 31  # what int32 holds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A trajectory, or the continuation of one: the next token is completion token `position`.

    Sampling depends on (`seed`, completion position) only, so a cut trajectory continues from the
    tokens so far and the position reached.

    Attributes:
        lora: name of the engine's adapter to generate with; "" for the model as it is.
        top_p, top_k: see `Truncation`. Greedy requests ignore them.
    """

    id: int
    tokens: Int32Array  # [T]
    position: int
    seed: int
    max_new_tokens: int
    temperature: float  # 0: greedy
    stop_token_ids: tuple[int, ...]
    lora: str = ""
    top_p: float = 1.0
    top_k: int = 0

    def resumed(self, tokens: Int32Array) -> GenerationRequest:
        """The request that continues this one after `tokens` (prompt and all tokens so far)."""
        num_new = len(tokens) - len(self.tokens)
        return replace(
            self,
            tokens=tokens,
            position=self.position + num_new,
            max_new_tokens=self.max_new_tokens - num_new,
        )


def parse_request(
    raw: Mapping[str, Any],
    *,
    max_context_len: int,
    vocab_size: int | None,
    lora_names: Collection[str] = (),
) -> GenerationRequest:
    """Checks one wire request. Raises ValueError that names id, key and limit."""
    unknown = sorted(set(raw) - REQUEST_KEYS - OPTIONAL_KEYS)
    if unknown:
        raise ValueError(
            f"request {raw.get('id')!r}: unsupported keys {unknown}; allowed: "
            f"{sorted(REQUEST_KEYS | OPTIONAL_KEYS)}"
        )
    missing = sorted(REQUEST_KEYS - set(raw))
    if missing:
        raise ValueError(f"request {raw.get('id')!r}: missing keys {missing}")
    request = GenerationRequest(
        id=_integer(raw, "id", low=-(1 << 63), high=(1 << 63) - 1),
        tokens=_tokens(raw, vocab_size),
        position=_integer(raw, "position", low=0, high=(1 << 31) - 1),
        seed=_integer(raw, "seed", low=0, high=(1 << 63) - 1),
        max_new_tokens=_integer(raw, "max_new_tokens", low=1, high=(1 << 31) - 1),
        temperature=_temperature(raw),
        stop_token_ids=_stop_token_ids(raw),
        lora=_lora(raw, lora_names),
        top_p=_top_p(raw),
        top_k=_integer({"top_k": 0, **raw}, "top_k", low=0, high=(1 << 31) - 1),
    )
    total = len(request.tokens) + request.max_new_tokens
    if total > max_context_len:
        raise ValueError(
            f"request {request.id}: {len(request.tokens)} tokens plus max_new_tokens="
            f"{request.max_new_tokens} make {total}, more than max_context_len={max_context_len}; "
            "shorten the prompt, lower max_new_tokens or raise max_context_len"
        )
    return request


def _integer(raw: Mapping[str, Any], key: str, *, low: int, high: int) -> int:
    number = raw[key]
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"request {raw.get('id')!r}: {key} must be an integer, got {number!r}")
    if not low <= number <= high:
        raise ValueError(
            f"request {raw.get('id')!r}: {key} must lie in [{low}, {high}], got {number}"
        )
    return number


def _tokens(raw: Mapping[str, Any], vocab_size: int | None) -> Int32Array:
    array = np.asarray(raw["tokens"])
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(
            f"request {raw.get('id')!r}: tokens must be a non-empty list of integers, got shape "
            f"{array.shape} of {array.dtype}"
        )
    problem = wrong_token(array, vocab_size)
    if problem:
        raise ValueError(f"request {raw.get('id')!r}: {problem}")
    return array.astype(np.int32, copy=False)


def _temperature(raw: Mapping[str, Any]) -> float:
    value = raw["temperature"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"request {raw.get('id')!r}: temperature must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number) or (number != 0 and number < MIN_TEMPERATURE):
        raise ValueError(
            f"request {raw.get('id')!r}: temperature must be 0 (greedy), or finite and at least "
            f"{MIN_TEMPERATURE}, got {number}"
        )
    return number


def _top_p(raw: Mapping[str, Any]) -> float:
    value = raw.get("top_p", 1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(
            f"request {raw.get('id')!r}: top_p must lie above 0 and be at most 1, got {value!r}"
        )
    return float(value)


def _stop_token_ids(raw: Mapping[str, Any]) -> tuple[int, ...]:
    values = raw["stop_token_ids"]
    try:
        array = np.asarray(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros((0, 0), np.int64)
    if array.ndim != 1 or (array.size and int(array.min()) < 0):
        raise ValueError(
            f"request {raw.get('id')!r}: stop_token_ids must be a list of token ids, got {values!r}"
        )
    return tuple(int(token) for token in array)


def _lora(raw: Mapping[str, Any], known: Collection[str]) -> str:
    name = raw.get("lora", "")
    if not isinstance(name, str):
        raise ValueError(f"request {raw.get('id')!r}: lora must be a name, got {name!r}")
    if name and name not in known:
        raise ValueError(
            f"request {raw.get('id')!r}: there is no LoRA adapter {name!r}; known: "
            f"{', '.join(sorted(known)) or 'none'} (the pool's setting lora_adapters names them)"
        )
    return name


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
