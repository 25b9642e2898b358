"""`umbra serve` with auxiliary pools: one in turn with the policy, one with memory of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import Server, run_umbra, serving
from pool_log import assert_never_both_awake
from training_models import listed, make_model, save_model

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.text.model_tokenizer import ModelTokenizer

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROMPT = "12+3="
COMPLETIONS = "/v1/completions"
SEEDS = {"tiny": 0, "judge": 7, "referee": 11}
SHAPE: dict[str, Any] = {"max_position_embeddings": 4096}
LONG = 1500  # tokens: several turns
CONFIG = """
[model]
path = "{folder}/tiny"
[pool]
device = "cpu"
[pools.judge]
model_path = "{folder}/judge"
device = "cpu"
tick_ms = 5.0
num_threads = 1
max_wait_s = 0.2
max_turn_s = 0.2
[pools.referee]
model_path = "{folder}/referee"
mode = "standalone"
device = "cpu"
tick_ms = 5.0
num_threads = 1
"""


@pytest.fixture(scope="module")
def folder() -> Generator[Path]:
    """A short path: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as name:
        folder = Path(name)
        for model, seed in SEEDS.items():
            save_model(folder / model, seed=seed, **SHAPE)
        (folder / "serve.toml").write_text(CONFIG.format(folder=folder))
        yield folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Generator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBRA_LOG_LEVEL", "DEBUG")
        with serving(folder, folder / "serve.toml", ["pool.num_threads=1"]) as server:
            yield server
            assert server.end() == 0
    assert_never_both_awake(folder / "run/serve/logs/supervisor.log")


def greedy_text(folder: Path, model: str, prompt: list[int], num_tokens: int) -> str:
    """The completion that transformers generates."""
    made: Any = make_model(seed=SEEDS[model], **SHAPE)
    with torch.no_grad():
        tokens = made.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
    return ModelTokenizer.open(folder / model).decode(listed(tokens[0])[len(prompt) :])


def test_each_pool_answers_by_its_name_as_its_own_model(server: Server, folder: Path) -> None:
    tokenizer = ModelTokenizer.open(folder / "tiny")  # all three have the same
    plain, chat = tokenizer.encode_prompt(PROMPT), tokenizer.encode(f"u={PROMPT} a=")
    body: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    messages = [{"role": "user", "content": PROMPT}]

    for model in SEEDS:
        answer = server.complete(model=model, prompt=PROMPT, **body)
        talk = server.chat(model=model, messages=messages, **body)

        assert answer["model"] == model
        assert answer["choices"][0]["text"] == greedy_text(folder, model, plain, 20)
        message = talk["choices"][0]["message"]["content"]
        assert message == greedy_text(folder, model, chat, 20)

    for policy in ({}, {"model": "policy"}):
        answer = server.complete(prompt=PROMPT, **policy, **body)
        assert answer["model"] == "tiny"
        assert answer["choices"][0]["text"] == greedy_text(folder, "tiny", plain, 20)


def test_models_are_described_together_and_each_by_its_names(server: Server) -> None:
    models = server.ask("/v1/models")[1]["data"]

    assert [model["id"] for model in models] == list(SEEDS)
    for model in models:
        assert server.ask(f"/v1/models/{model['id']}") == (200, model)
        assert (model["object"], model["max_model_len"]) == ("model", 4096)
    assert server.ask("/v1/models/policy") == (200, models[0])


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": PROMPT, "model": "jduge"}), ("/v1/models/some/jduge", None)],
)
def test_an_unknown_model_is_an_error_that_lists_the_known_ones(
    server: Server, path: str, body: object
) -> None:
    status, answer = server.ask(path, body)

    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["message"].endswith("there are: 'tiny', 'judge', 'referee'")


def test_a_stream_is_interrupted_for_the_judge_and_continues(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": LONG, "temperature": 0}
    text = server.complete(**body)["choices"][0]["text"]
    question = {"model": "judge", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    verdict = server.complete(**question)

    with server.streaming(COMPLETIONS, body) as events:
        chunks = [next(events)]
        asked = server.complete(**question)
        is_early = server.ask("/health")[1]["generations"] == 1
        chunks += list(events)

    assert is_early, "the stream ended before the judge's answer: make it longer"
    assert asked["choices"] == verdict["choices"]
    assert chunks.pop() == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@pytest.mark.umbra_allow_leaks("the server, which other tests share, starts another front")
def test_a_front_that_dies_while_a_pool_is_asked_serves_both_again(server: Server) -> None:
    bodies = [{"model": model, "prompt": PROMPT, "max_tokens": 20, "seed": 1} for model in SEEDS]
    expected = [server.complete(**body)["choices"] for body in bodies]
    long = {"model": "judge", "prompt": PROMPT, "max_tokens": LONG, "seed": 1, "logprobs": 0}

    with server.streaming(COMPLETIONS, long) as events:
        next(events)  # the supervisor knows of it
        os.kill(server.pids()["front"], signal.SIGKILL)
    wait_for_front(server)

    assert [server.complete(**body)["choices"] for body in bodies] == expected


def wait_for_front(server: Server) -> None:
    deadline = time.monotonic() + 60.0
    while True:
        with contextlib.suppress(OSError):
            if server.ask("/v1/models")[0] == 200:
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_prompt_can_be_asked_of_either(server: Server, folder: Path) -> None:
    body = {"max_tokens": 20, "temperature": 0}
    texts = {
        model: server.complete(model=model, prompt=PROMPT, **body)["choices"][0]["text"]
        for model in SEEDS
    }
    assert len(set(texts.values())) == 3
    how = ("--prompt", PROMPT, "--max-tokens", 20, "--temperature", 0)

    for pool, model in (("judge", "judge"), ("policy", "tiny")):
        alone = run_umbra(folder, "generate", folder / "serve.toml", *how, "--pool", pool)

        assert (alone.returncode, alone.stdout) == (0, texts[model] + "\n"), alone.stderr


def test_a_config_that_cannot_be_served_is_an_error_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / "serve.toml"
    ask = ("--prompt", "1")
    wrong: list[tuple[tuple[object, ...], str]] = [
        (("serve", config, f"pools.tiny.model_path={folder}/judge"),
         "[pool] and [pools.tiny] both have a model 'tiny'"),
        (("serve", config, "pool.engine=vllm", f"pool.lora_adapters={{judge = '{folder}/tiny'}}"),
         "[pool] and [pools.judge] both have a model 'judge'"),
        (("serve", config, "pool.engine=vllm", f"pool.lora_adapters={{policy = '{folder}/tiny'}}"),
         "[pool] has two models 'policy'"),
        (("generate", config, *ask, "--pool", "policy", "pools.judge.engine=vllm",
          f"pools.judge.lora_adapters={{policy = '{folder}/tiny'}}"),
         "[pool] and [pools.judge] both have a model 'policy'"),
        (("serve", config, "pools.judge.model_path=/none"), "pools.judge.model_path: no directory"),
        (("serve", config, f"pools.policy.model_path={folder}/judge"), "this name is taken"),
        (("generate", config, *ask, "--pool", "jduge"), "there are: 'policy', 'judge', 'referee'"),
        (("generate", config, *ask, "--pool", "judge", "--engine", "vlm"), "pools.judge.engine"),
        (("generate", config, "--prompt", "1" * 5000, "--pool", "judge"),
         "(pools.judge.max_context_len)"),
    ]  # fmt: skip

    for arguments, problem in wrong:
        assert main([str(argument) for argument in arguments]) == 2, arguments
        assert problem in capsys.readouterr().err, arguments
