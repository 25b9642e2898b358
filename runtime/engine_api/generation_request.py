"""A generation request to an engine. Torch-free. T: its tokens, the prompt's and generated ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from umbra.runtime.engine_api.token_ids import wrong_token

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
