"""Requests of clients and the text that they get; which model and stops are served."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folders import SPECIAL, write_model_folder
from tokenizers import Tokenizer, decoders, models

from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import ServeConfig
from umbra.trainer.serving.choice import StopScanner, TextStream
from umbra.trainer.serving.openai_messages import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    RequestBodies,
    parse_body,
)
from umbra.trainer.serving.served_config import read_serve_config, served_pools, trained_instead
from umbra.trainer.serving.served_pool import GenerationJob, ServedPool


def decode_bytes(tokens: Sequence[int]) -> str:
    """A token a byte."""
    return bytes(tokens).decode(errors="replace")


def cut(tokens: Sequence[int], places: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(place % (len(tokens) + 1) for place in places), len(tokens)]
    return [tokens[start:stop] for start, stop in pairwise(bounds)]


@given(st.text(max_size=30), st.lists(st.integers(0, 1000), max_size=20))
def test_text_is_shown_character_by_character(text: str, places: list[int]) -> None:
    stream = TextStream(decode_bytes)

    pieces = [stream.add(run) for run in cut(text.encode(errors="replace"), places)]

    assert "".join([*pieces, stream.close()]) == text.encode(errors="replace").decode()
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=20))
def test_bytes_that_are_no_text_come_out_as_when_decoded_at_once(
    data: bytes, places: list[int]
) -> None:
    stream = TextStream(decode_bytes)

    pieces = [stream.add(run) for run in cut(data, places)]

    assert "".join([*pieces, stream.close()]) == decode_bytes(data)


@given(st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 1000), max_size=6))
def test_a_tokenizer_that_drops_the_first_space_keeps_the_others(
    tokens: list[int], places: list[int]
) -> None:
    stream = TextStream(decode_words)

    pieces = [stream.add(run) for run in cut(tokens, places)]

    assert "".join([*pieces, stream.close()]) == decode_words(tokens)


def make_word_tokenizer() -> Any:
    vocab = {"<s>": 0, "▁a": 1, "▁b": 2, "c": 3, "▁": 4}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


WORDS = make_word_tokenizer()


def decode_words(tokens: Sequence[int]) -> str:
    text: str = WORDS.decode(list(tokens), skip_special_tokens=True)
    return text


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 1000), max_size=10),
)
def test_the_stop_that_is_complete_first_ends_the_text(
    text: str, stops: list[str], places: list[int]
) -> None:
    ends = [(place + len(s), place) for s in stops if (place := text.find(s)) >= 0]
    scanner = StopScanner(stops)
    shown = ""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]

    for start, stop in pairwise(bounds):
        shown += scanner.add(text[start:stop])
        if scanner.is_stopped:
            break
    shown += scanner.close()

    assert scanner.is_stopped == bool(ends)
    assert shown == (text[: min(ends)[1]] if ends else text)


def test_a_stop_is_held_back_only_while_it_may_come() -> None:
    scanner = StopScanner(["END"])

    assert [scanner.add(text) for text in ["an E", "N", "d", " EN", "DX"]] == [
        "an ", "", "ENd", " ", "",
    ]  # fmt: skip
    assert scanner.is_stopped


def test_stops_that_almost_come_for_long_cost_little_time() -> None:
    scanner = StopScanner(["\n" * 1000 + str(idx) for idx in range(16)])
    began_s = time.process_time()

    shown = "".join(scanner.add("\n") for _ in range(2000))

    assert shown + scanner.close() == "\n" * 2000
    assert time.process_time() - began_s < 1.0


def test_null_and_neutral_values_are_as_if_they_were_not_there() -> None:
    body = {"prompt": "x", "stop": None, "top_p": 1, "top_k": -1, "user": "me", "n": 2}

    request = parse_body(body, CompletionRequest)

    assert (request.prompts, request.stops, request.n) == (["x"], [], 2)


def test_prompts_are_texts_or_tokens_one_or_several() -> None:
    given: list[Any] = ["a", ["a", "b"], [1, 2], [[1], [2, 3]]]

    prompts = [parse_body({"prompt": prompt}, CompletionRequest).prompts for prompt in given]

    assert prompts == [["a"], ["a", "b"], [[1, 2]], [[1], [2, 3]]]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"messages": [{"role": "user"}] * 16_385}, "messages"),
        ({"logit_bias": {"1": [1] * 100_000}}, "logit_bias"),
        ({"n": 129}, "n"),
        ({"seed": -1}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream_options": {"x": 1}}, "stream_options"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
def test_a_wrong_parameter_is_named(changes: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **changes}

    with pytest.raises(ApiError) as caught:
        parse_body(body, ChatRequest)

    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(str(caught.value)) < 300


def test_a_trained_model_that_is_not_the_one_served_is_found(tmp_path: Path) -> None:
    start = tmp_path / "model"
    start.mkdir()
    own = [f"run.dir={tmp_path / 'run'}"]
    export = tmp_path / "run/export"

    before = trained_instead(read_serve_config(str(start), own))
    export.mkdir(parents=True)

    assert before is None
    assert trained_instead(read_serve_config(str(start), own)) == export
    assert trained_instead(read_serve_config(str(export), own)) is None


@pytest.mark.parametrize(("on_update", "num_held"), [("keep", 10), ("drain", 8)])
def test_engines_hold_more_completions_than_they_work_on_unless_they_must_end_all(
    on_update: str, num_held: int, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path / "model")
    values = {"model": {"path": str(folder)}, "pool": {"max_num_seqs": 8, "on_update": on_update}}
    (config,) = served_pools(check_config(ServeConfig, values, "config"))

    assert config.dispatch.max_inflight_per_engine == num_held


def test_the_stops_of_rollouts_end_served_completions_too(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    rollout = {"stop": ["</a>", SPECIAL[-1]], "stop_token_ids": [9]}
    values = {"model": {"path": str(folder)}, "rollout": rollout}
    (config,) = served_pools(check_config(ServeConfig, values, "config"))
    request = parse_body({"prompt": "1", "stop": "own"}, CompletionRequest)

    async def job() -> GenerationJob:
        context: Any = SimpleNamespace(supervisor=None)
        pool = ServedPool(config, context, print)
        async with pool.text:
            return await pool.completion(request)

    sampling = asyncio.run(job()).sampling

    assert sampling.stops == ["own", "</a>", SPECIAL[-1]]
    assert {9, len(SPECIAL) - 1} <= set(sampling.options.stop_token_ids)


async def arriving(*sizes: int, ends: bool = True) -> AsyncGenerator[bytes]:
    """Chunks of these sizes, and then the end, or nothing, as of a client that stops there."""
    for size in sizes:
        yield b"x" * size
    if not ends:
        await asyncio.Event().wait()


def test_bytes_count_from_their_arrival_until_the_answer() -> None:
    async def read() -> None:
        with bodies.holding() as first, bodies.holding() as second:
            for body, chunks in ((first, arriving(5, 5, 99)), (second, arriving(5))):
                with contextlib.suppress(ApiError):
                    await bodies.read(chunks, body)
            with bodies.holding() as third:
                await bodies.read(arriving(1), third)

    bodies = RequestBodies(max_nbytes=10, max_held_nbytes=15, limit_s=30.0)

    for _ in range(2):
        with pytest.raises(ApiError, match="have 15 of at most 15 bytes; try again") as error:
            asyncio.run(read())
        assert error.value.status == 429


def test_no_more_is_read_of_a_body_above_its_limit() -> None:
    bodies = RequestBodies(max_nbytes=10, max_held_nbytes=100, limit_s=30.0)

    with bodies.holding() as body, pytest.raises(ApiError, match="exceeds 10 bytes") as error:
        asyncio.run(bodies.read(arriving(8, 3, ends=False), body))

    assert (error.value.status, len(body)) == (413, 8)


def test_a_body_that_stops_in_the_middle_is_refused_after_a_while() -> None:
    bodies = RequestBodies(max_nbytes=10, max_held_nbytes=10, limit_s=0.05)

    with (
        bodies.holding() as body,
        pytest.raises(ApiError, match=r"^8 bytes of the body arrived in 0.05 s") as error,
    ):
        asyncio.run(bodies.read(arriving(8, ends=False), body))

    assert error.value.status == 408
