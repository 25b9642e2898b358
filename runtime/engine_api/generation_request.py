"""A generation request to an engine. Torch-free. T: its tokens, the prompt's and generated ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from umbra.runtime.engine_api.engine_names import MIN_TEMPERATURE
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
OPTIONAL_KEYS: Final = frozenset({"lora", "top_p", "top_k", "forced"})

_NUM_IDS: Final = 1 << 31  # what int32 holds
_NO_TOKENS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A trajectory, or the continuation of one: the next token is completion token `position`.

    Sampling depends on (`seed`, completion position) only, so a cut trajectory continues from the
    tokens so far and the position reached.

    Attributes:
        lora: name of the engine's adapter to generate with; "" for the model as it is.
        top_p, top_k: see `Truncation`. Greedy requests ignore them.
        forced: [`max_new_tokens`] or empty. The engine appends these tokens in place of sampled
            ones and reports their logprobs, at temperature 1. They cost a prefill, not a decode.
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
    forced: Int32Array = field(default_factory=_NO_TOKENS.copy)

    def resumed(self, tokens: Int32Array) -> GenerationRequest:
        """The request that continues this one after `tokens` (prompt and all tokens so far)."""
        num_new = len(tokens) - len(self.tokens)
        return replace(
            self,
            tokens=tokens,
            position=self.position + num_new,
            max_new_tokens=self.max_new_tokens - num_new,
            forced=self.forced[num_new:],
        )


def parse_request(
    raw: Mapping[str, Any],
    *,
    max_context_len: int,
    vocab_size: int | None,
    lora_names: Collection[str] = (),
) -> GenerationRequest:
    """Checks one wire request. Raises ValueError that names id, key and limit."""
    try:
        request = _parse(raw, vocab_size, lora_names)
    except (RequestRefused, TypeError, ValueError) as error:
        raise ValueError(f"request {raw.get('id')!r}: {error}") from None
    total = len(request.tokens) + request.max_new_tokens
    if total > max_context_len:
        raise ValueError(
            f"request {request.id}: {len(request.tokens)} tokens plus max_new_tokens="
            f"{request.max_new_tokens} make {total}, more than max_context_len={max_context_len}; "
            "shorten the prompt, lower max_new_tokens or raise max_context_len"
        )
    return request


def _parse(
    raw: Mapping[str, Any], vocab_size: int | None, lora_names: Collection[str]
) -> GenerationRequest:
    known = REQUEST_KEYS | OPTIONAL_KEYS
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"unsupported keys {unknown}; allowed: {sorted(known)}")
    if missing := sorted(REQUEST_KEYS - set(raw)):
        raise ValueError(f"missing keys {missing}")
    values: dict[str, Any] = {"lora": "", "top_p": 1.0, "top_k": 0, "forced": _NO_TOKENS, **raw}
    temperature, top_p, lora = (
        _number(values, "temperature"),
        _number(values, "top_p"),
        values["lora"],
    )
    if temperature and not MIN_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            "temperature must be 0 (greedy), or finite and at least "
            f"{MIN_TEMPERATURE}, got {temperature}"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie above 0 and be at most 1, got {top_p}")
    if lora not in ("", *lora_names):
        raise ValueError(
            f"there is no LoRA adapter {lora!r}; known: {', '.join(sorted(lora_names)) or 'none'} "
            "(the pool's setting lora_adapters names them)"
        )
    tokens = token_ids(raw["tokens"], vocab_size or 0)
    if not tokens.size:
        raise ValueError("tokens is empty")
    forced = token_ids(values["forced"], vocab_size or 0, "forced")
    is_whole = len(forced) == values["max_new_tokens"] and not len(values["stop_token_ids"])
    is_plain = temperature == top_p == 1 and not values["top_k"]
    if forced.size and not (is_whole and is_plain):
        raise ValueError(
            f"{len(forced)} forced tokens need max_new_tokens = {len(forced)}, temperature 1, and "
            "neither top_p, top_k nor stop_token_ids"
        )
    return GenerationRequest(
        id=_integer(values, "id", low=-(1 << 63), high=(1 << 63) - 1),
        tokens=tokens,
        position=_integer(values, "position", low=0, high=(1 << 31) - 1),
        seed=_integer(values, "seed", low=0, high=(1 << 63) - 1),
        max_new_tokens=_integer(values, "max_new_tokens", low=1, high=(1 << 31) - 1),
        temperature=temperature,
        stop_token_ids=tuple(token_ids(raw["stop_token_ids"], what="stop_token_ids").tolist()),
        lora=lora,
        top_p=top_p,
        top_k=_integer(values, "top_k", low=0, high=(1 << 31) - 1),
        forced=forced,
    )


def _integer(values: Mapping[str, Any], key: str, *, low: int, high: int) -> int:
    number = values[key]
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{key} must be an integer, got {number!r}")
    if not low <= number <= high:
        raise ValueError(f"{key} must lie in [{low}, {high}], got {number}")
    return number


def _number(values: Mapping[str, Any], key: str) -> float:
    number = values[key]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"{key} must be a number, got {number!r}")
    return float(number)


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


def _as_array(tokens: object) -> NDArray[Any] | None:
    """None if they are not a sequence of numbers; objects for numbers beyond 64 bits."""
    if isinstance(tokens, np.ndarray):
        return cast("NDArray[Any]", tokens)
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray | memoryview):
        return None
    given = cast("Sequence[Any]", tokens)
    kinds = set[type](map(type, given))
    if bool in kinds or not all(issubclass(kind, int | np.integer) for kind in kinds):
        return None
    try:
        return np.asarray(given, np.int64)
    except OverflowError:
        return np.asarray(given, object)
