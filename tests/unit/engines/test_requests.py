"""Requests are validated, with errors that name the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_runs import wire_request

from umbra.runtime.engine_api.generation_request import GenerationRequest, parse_request


def parse(raw: dict[str, Any]) -> GenerationRequest:
    return parse_request(raw, max_context_len=32, vocab_size=100, lora_names=("b", "a"))


def test_a_wire_request_becomes_a_value() -> None:
    request = parse(wire_request(7, [1, 2, 3], position=4, temperature=0.5, stop_token_ids=[9]))

    assert (request.id, request.position, request.temperature) == (7, 4, 0.5)
    assert request.tokens.dtype == np.int32
    assert request.stop_token_ids == (9,)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"min_p": 0.9}, r"unsupported keys \['min_p'\]"),
        ({"top_p": 0.0}, "top_p must lie above 0 and be at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_p": "most"}, "top_p"),
        ({"top_k": -1}, "top_k must lie in"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"id": 1.5}, "id must be an integer"),
        ({"id": True}, "id must be an integer"),
        ({"tokens": np.zeros(0, np.int32)}, "tokens is empty"),
        ({"tokens": np.zeros((2, 2), np.int32)}, "a 1-D sequence"),
        ({"tokens": np.zeros(3, np.float32)}, "integer token ids"),
        ({"tokens": [1, 100]}, "token 100 at index 1 is outside the model's .* of 100"),
        ({"tokens": [-1, 1]}, "token -1 at index 0 is outside"),
        ({"position": -1}, "position"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 30}, "more than max_context_len=32"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-5}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"lora": 3}, "no LoRA adapter 3"),
        ({"lora": "c"}, "no LoRA adapter 'c'; known: a, b"),
    ],
)
def test_a_wrong_request_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(wire_request(1, [1, 2, 3]) | change)


def test_a_request_may_name_an_adapter() -> None:
    assert parse(wire_request(1, [1])).lora == ""
    assert parse(wire_request(1, [1], lora="a")).lora == "a"


def test_a_request_may_truncate_the_distribution() -> None:
    whole, truncated = parse(wire_request(1, [1])), parse(wire_request(1, [1], top_p=0.9, top_k=5))

    assert (whole.top_p, whole.top_k) == (1.0, 0)
    assert (truncated.top_p, truncated.top_k) == (0.9, 5)


def test_a_missing_key_is_named() -> None:
    raw = wire_request(1, [1, 2, 3])
    del raw["temperature"]

    with pytest.raises(ValueError, match=r"missing keys.*temperature"):
        parse(raw)


def test_a_resumed_request_continues_its_count() -> None:
    request = parse(wire_request(1, [1, 2, 3], position=4, max_new_tokens=10))

    rest = request.resumed(np.array([1, 2, 3, 8, 9], np.int32))

    assert (rest.position, rest.max_new_tokens) == (6, 8)
    assert rest.tokens.tolist() == [1, 2, 3, 8, 9]
    assert rest.seed == request.seed
