"""`umbra serve` over HTTP: real processes, a small model from a seed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import Server, serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training_models import CHARS, VOCAB_SIZE, listed, make_model, save_model

from umbra.runtime.text.model_tokenizer import ModelTokenizer

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROMPT = "12+3="
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
IDLE = {"state": "SERVING", "requests": 0}
LONG = 3000  # tokens: time enough to act in the middle


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder, max_position_embeddings=4096)
    save_byte_tokenizer(folder / "tokenizer.json")
    return folder


def save_byte_tokenizer(path: Path) -> None:
    """One token a character, and some that end or begin in the middle of an é (bytes C3 A9)."""
    tokens = ["<pad>", "<eos>", *CHARS.replace(" ", "Ġ")]
    tokens += [f"{char}Ã" for char in "abcdefghijk"]
    tokens += [f"©{char}" for char in "abcdefghijklm"[: VOCAB_SIZE - len(tokens)]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Generator[Server]:
    # Not below pytest's folder: a socket's path may have 100 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as folder,
        serving(Path(folder), model_dir, ["pool.count=2"]) as server,
    ):
        yield server
        assert server.end() == 0


def greedy_text(model_dir: Path, prompt: list[int], num_tokens: int) -> str:
    """The completion that transformers generates."""
    model: Any = make_model(max_position_embeddings=4096)
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)[
            0
        ]
    return ModelTokenizer.open(model_dir).decode(listed(tokens)[len(prompt) :])


def text_of(chunks: list[Any]) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
    )


def test_a_completion_is_what_transformers_generates(server: Server, model_dir: Path) -> None:
    tokens = ModelTokenizer.open(model_dir).encode_prompt(PROMPT)

    answer = server.complete(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)

    choice = answer["choices"][0]
    assert choice["text"] == greedy_text(model_dir, tokens, 30)
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 30, "total_tokens": 35}
    of_tokens = server.complete(prompt=tokens, max_tokens=30, temperature=0)
    assert of_tokens["choices"][0]["text"] == choice["text"]


def test_a_chat_is_rendered_by_the_models_own_template(server: Server, model_dir: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    tokens = ModelTokenizer.open(model_dir).encode(f"u={PROMPT} a=")

    answer = server.chat(messages=messages, max_completion_tokens=20, temperature=0)

    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == (
        "assistant",
        greedy_text(model_dir, tokens, 20),
    )
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_a_stream_adds_up_to_the_whole_answer(server: Server) -> None:
    body = {"prompt": [PROMPT, "7"], "max_tokens": 60, "seed": 5, "n": 2, "logprobs": 1}
    whole = server.complete(**body)

    chunks = server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})

    assert chunks[-1]["choices"] == []
    assert chunks.pop()["usage"] == whole["usage"]
    assert len({choice["text"] for choice in whole["choices"]}) == 4, "each choice is its own"
    for index, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs"):
            streamed = [item for part in own if part["logprobs"] for item in part["logprobs"][name]]
            assert streamed == pytest.approx(choice["logprobs"][name])


def test_a_stop_text_is_cut_off_wherever_it_comes(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 3}
    text: str = server.complete(**body)["choices"][0]["text"]
    stop = text[20:23]
    place = text.find(stop)

    answer = server.complete(**body, stop=["never", stop], logprobs=0)
    chunks = server.stream(COMPLETIONS, {**body, "stop": stop})

    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[:place], "stop")
    num_tokens = answer["usage"]["completion_tokens"]
    assert len(choice["logprobs"]["tokens"]) == num_tokens
    with_stop = server.complete(**{**body, "max_tokens": num_tokens})["choices"][0]["text"]
    without = server.complete(**{**body, "max_tokens": num_tokens - 1})["choices"][0]["text"]
    assert stop in with_stop
    assert stop not in without
    assert text_of(chunks) == text[:place]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_token_ends_the_text_before_it(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 3}
    whole = server.complete(**body, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    letter = next(token for token in whole[5:] if token in set(CHARS) - set(whole[:5]))
    before = server.complete(**{**body, "max_tokens": whole.index(letter)})["choices"][0]["text"]

    answer = server.complete(**body, stop_token_ids=[2 + CHARS.index(letter)])

    assert answer["choices"][0]["text"] == before
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == whole.index(letter) + 1


def test_a_character_in_two_tokens_is_never_shown_by_halves(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 2.0, "seed": 8, "n": 20}
    texts = [choice["text"] for choice in server.complete(**body)["choices"]]
    assert "é" in "".join(texts)

    chunks = server.stream(COMPLETIONS, body)

    for index, text in enumerate(texts):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert text_of(own) == text


def test_chat_logprobs_name_each_token(server: Server) -> None:
    messages = [{"role": "user", "content": PROMPT}]

    answer = server.chat(messages=messages, max_tokens=40, seed=1, logprobs=True)

    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(item["logprob"] < 0 for item in content)
    for item in content:
        is_whole = "\ufffd" not in item["token"]
        assert item["bytes"] == (list(item["token"].encode()) if is_whole else None)


@pytest.mark.umbra_allow_leaks("the server, which other tests share, starts another engine")
def test_a_killed_engine_costs_a_stream_nothing(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": LONG, "temperature": 0}
    answer = server.complete(**body)
    assert answer["usage"]["completion_tokens"] == LONG, "this seed ends early: take another"
    text = answer["choices"][0]["text"]

    with server.streaming(COMPLETIONS, body) as events:
        chunks = [next(events)]
        engines = server.ask("/health")[1]["engines"]
        (name,) = (name.partition("#")[0] for name, at in engines.items() if at["requests"])
        os.kill(server.pids()[name], signal.SIGKILL)
        chunks += list(events)

    assert chunks.pop() == "[DONE]"
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert text_of(chunks) == text
    other = ({"policy-0", "policy-1"} - {name}).pop()
    server.wait_for_health(engines={f"{name}#2": IDLE, f"{other}#1": IDLE})
    assert "trajectories keep" in (server.folder / "stderr.txt").read_text(), "it was in the middle"


def test_what_is_not_possible_is_refused_in_the_apis_own_form(server: Server) -> None:
    prompt = {"prompt": PROMPT}
    wrong: list[tuple[str, dict[str, Any], int, str | None, str]] = [
        (COMPLETIONS, {}, 400, "prompt", "prompt is missing"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
        (COMPLETIONS, {**prompt, "top_p": 0.9}, 400, "top_p", "only 1"),
        (COMPLETIONS, {**prompt, "echo": True}, 400, "echo", "not supported"),
        (COMPLETIONS, {**prompt, "grammar": "x"}, 400, "grammar", "not supported"),
        (COMPLETIONS, {**prompt, "temperature": -1}, 400, "temperature", "greater than"),
        (COMPLETIONS, {**prompt, "temperature": 1e-9}, 400, None, "temperature must be 0"),
        (COMPLETIONS, {**prompt, "max_tokens": 0}, 400, "max_tokens", "greater than"),
        (COMPLETIONS, {**prompt, "max_tokens": 4092}, 400, "prompt", "context holds 4096"),
        (COMPLETIONS, {"prompt": [1, 64]}, 400, "prompt",
         "prompt: token 64 at index 1 is outside the model's vocabulary of 64 (0 to 63)"),
        (COMPLETIONS, {"prompt": [[1], [2, -7]]}, 400, "prompt", "token -7 at index 1 is outside"),
        (COMPLETIONS, {"prompt": [1 << 70]}, 400, "prompt", f"token {1 << 70} at index 0"),
        (COMPLETIONS, {"prompt": [1.5]}, 400, "prompt", "must be a text or a list of token ids"),
        (COMPLETIONS, {"prompt": [True]}, 400, "prompt", "must be a text or a list of token ids"),
        (COMPLETIONS, {**prompt, "stop": 7}, 400, "stop", "must be a text or a list of up to 16"),
        (COMPLETIONS, {**prompt, "stop_token_ids": [3, -1]}, 400, "stop_token_ids",
         "token -1 at index 1 is not a token id"),
        (COMPLETIONS, {**prompt, "model": "gpt"}, 404, "model", "there are: 'tiny'"),
        (COMPLETIONS, {"prompt": ["1"] * 40, "n": 128}, 429, None, "5120 choices are too many"),
        (CHAT, {"messages": []}, 400, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
         "messages", "umbra works on text only"),
        (CHAT, {"messages": [{"role": "assistant", "content": "1"}]}, 400, "messages",
         "set continue_final_message"),
        (CHAT, {"messages": [{"role": "user", "content": "1"}], "add_generation_prompt": False},
         400, "add_generation_prompt", "only with continue_final_message"),
        (CHAT, {"messages": [{"role": "user", "content": "1"}], "tools": [{}]}, 400, "tools",
         "not supported"),
    ]  # fmt: skip

    for path, body, expected, param, problem in wrong:
        status, answer = server.ask(path, body)
        error = answer["error"]
        assert (status, error["param"]) == (expected, param), (body, answer)
        assert problem in error["message"], (body, answer)
        assert set(error) == {"message", "type", "param", "code"}


def test_a_malformed_request_is_an_error(server: Server) -> None:
    assert server.ask(COMPLETIONS, raw=b"{")[0] == 400
    assert server.ask(COMPLETIONS, raw=b"[" * 100_000)[0] == 400
    assert server.ask(COMPLETIONS, {"prompt": "\ud800", "max_tokens": 2})[0] == 400
    assert server.ask(COMPLETIONS, [1])[0] == 400
    assert server.ask(COMPLETIONS, {}, headers={"Content-Type": "text/plain"})[0] == 415
    assert server.ask("/v1/nothing", {})[0] == 404
    assert server.ask(COMPLETIONS)[0] == 405
    status, answer = server.ask(COMPLETIONS, {"prompt": "1" * (9 << 20)})
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    models = server.ask("/v1/models")[1]["data"]
    assert [model["id"] for model in models] == ["tiny"]
