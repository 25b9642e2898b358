"""The commands `umbra serve` and `umbra generate`: how they start, refuse and end."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import Server, run_umbra, serving
from training_models import listed, make_model, save_model
from weight_file import write_weight_file

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.text.model_tokenizer import ModelTokenizer

pytestmark = [pytest.mark.process, pytest.mark.slow]

ECHO = ("pool.device=cpu", "pool.engine=echo", "pool.engine_args.vocab_size=64")
"""For tests of the command and not of the model: an engine without torch starts sooner."""

NUM_CLIENTS = 1000
WARNING = "anybody who can reach this address can use it: set --api-key\n"


@pytest.fixture
def folder() -> Generator[Path]:
    """A short path: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as name:
        yield Path(name)


def test_clients_that_hang_up_free_the_engines_and_a_signal_ends_it_all(folder: Path) -> None:
    model = save_model(folder / "tiny", max_position_embeddings=4096)
    slow = [
        f"pool.engine_args.{setting}" for setting in ("vocab_size=1_000_000", "tokens_per_s=20")
    ]
    # 200 seconds: among so many tokens no stop comes; logprobs, because they have no text
    body = {"prompt": "1", "max_tokens": 4000, "n": 4, "logprobs": 0}
    busy = {f"policy-{idx}#1": {"state": "SERVING", "requests": 2} for idx in range(2)}

    with serving(folder, model, ["pool.engine=echo", "pool.count=2", *slow]) as server:
        with server.streaming("/v1/completions", body) as events:
            next(events)
            server.wait_for_health(generations=4, engines=busy)
        server.wait_for_health(generations=0)
        with server.asking("/v1/completions", body):
            server.wait_for_health(generations=4)
        server.wait_for_health(generations=0)
        with (
            server.streaming("/v1/completions", body) as events,
            ThreadPoolExecutor(1) as threads,
        ):
            next(events)
            whole = threads.submit(server.ask, "/v1/completions", body)
            server.wait_for_health(generations=8)
            signalled_at = time.monotonic()
            status = server.end(signal.SIGINT)
            took_s = time.monotonic() - signalled_at
            *rest, last = list(events)

    assert status == 0
    assert took_s < 30.0
    assert not [event for event in rest if "error" in event or event == "[DONE]"]
    assert last["error"]["message"] == "the server is shutting down"
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "shutting_down")
    assert whole.result() == (503, last)


def test_a_stop_answers_every_one_of_many_waiting_clients(folder: Path) -> None:
    """Some of them are not even accepted yet."""
    model = save_model(folder / "tiny", max_position_embeddings=4096)
    slow = ("pool.engine_args.vocab_size=1_000_000", "pool.engine_args.tokens_per_s=1")
    body = json.dumps({"prompt": "1", "max_tokens": 4000, "logprobs": 0}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )

    def connect() -> socket.socket:
        client = socket.create_connection((server.host, server.port))
        client.settimeout(30.0)
        client.sendall(request)
        return client

    with serving(folder, model, ["pool.engine=echo", *slow]) as server, ExitStack() as stack:
        clients = [stack.enter_context(connect()) for _ in range(NUM_CLIENTS // 2)]
        server.wait_for_health(generations=len(clients))
        clients += [stack.enter_context(connect()) for _ in range(NUM_CLIENTS // 2)]
        status = server.end(signal.SIGTERM)
        answers = [client.makefile("rb").readline() for client in clients]

    assert status == 0
    assert Counter(answers) == {b"HTTP/1.1 503 Service Unavailable\r\n": NUM_CLIENTS}


def test_a_server_with_a_key_lets_in_who_knows_it(folder: Path) -> None:
    model = save_model(folder / "tiny")

    with serving(folder, model, [*ECHO, "--host", "0.0.0.0", "--api-key", "secret"]) as server:
        assert WARNING not in greeting(server)
        body = {"prompt": "1", "max_tokens": 3}
        without = server.ask("/v1/completions", body)
        wrong = [
            server.ask("/v1/models", headers={"Authorization": b"Bearer " + guess})
            for guess in (b"guess", "clé".encode(), "clé".encode("latin-1"), b"secret\xff")
        ]
        right = server.ask("/v1/completions", body, headers={"Authorization": "Bearer secret"})
        assert server.ask("/health")[0] == 200
        assert server.end(signal.SIGTERM) == 0

    assert right[0] == 200
    for status, answer in (without, *wrong):
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_a_server_that_all_the_network_can_use_says_so(folder: Path) -> None:
    model = save_model(folder / "tiny")

    with serving(folder, model, [*ECHO, "--host", "0.0.0.0"]) as server:
        assert WARNING in greeting(server)


def greeting(server: Server) -> str:
    """What a server shows behind its address."""
    assert server.process.stdout is not None
    lines = iter(server.process.stdout.readline, "")
    return "".join(takewhile(lambda line: line != "Ctrl-C ends it\n", lines))


def test_a_signal_to_one_actor_replaces_it_and_one_to_all_is_a_stop(folder: Path) -> None:
    model = save_model(folder / "tiny")
    body = {"prompt": "1", "max_tokens": 20, "seed": 1}

    with serving(folder, model, ECHO) as server:
        assert WARNING not in greeting(server)
        expected = server.complete(**body)["choices"]
        for name in ("policy-0", "front"):
            os.kill(server.pids()[name], signal.SIGTERM)
            server.wait_for_successor(name)
            assert server.complete(**body)["choices"] == expected
        for pid in server.pids().values():
            os.kill(pid, signal.SIGTERM)
        status = server.end(signal.SIGTERM)

    assert status == 0
    notes = (folder / "stderr.txt").read_text()
    for name in ("policy-0", "front"):
        assert f"{name}#1 (pid " in notes
        assert f"{name}#2 (pid " not in notes
    assert notes.count("stopped by SIGTERM (exit status 143); restarting it in") == 2


def test_one_prompt_is_generated_by_an_engine_of_its_own(folder: Path) -> None:
    model_dir = save_model(folder / "tiny")
    tokens = ModelTokenizer.open(model_dir).encode("u=12+3= a=")
    model: Any = make_model()
    with torch.no_grad():
        made = model.generate(torch.tensor([tokens]), max_new_tokens=25, do_sample=False)[0]
    expected = ModelTokenizer.open(model_dir).decode(listed(made)[len(tokens) :])

    done = run_umbra(
        folder, "generate", model_dir, "--chat", "--prompt", "12+3=", "--max-tokens", 25,
        "--temperature", 0, "--engine", "embedded",
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    assert not list((folder / "sockets").iterdir())


def test_output_that_nobody_reads_ends_the_commands_quietly(folder: Path) -> None:
    model = save_model(folder / "tiny")
    reading, unread = os.pipe()
    os.close(reading)
    ask = ("generate", "--prompt", "12+3=", "--temperature", 0)

    try:
        alone = run_umbra(folder, *ask, model, *ECHO, stdout=unread)
        served = run_umbra(
            folder, "serve", model, *ECHO, "--port", 0, f"run.dir={folder / 'run'}", stdout=unread
        )
    finally:
        os.close(unread)

    for ended in (alone, served):
        assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")
    assert not list((folder / "sockets").iterdir())


def test_a_setup_that_cannot_work_is_an_error_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(folder / "tiny")
    config = folder / "serve.toml"
    config.write_text(f'[model]\npath = "{model}"\n[pool]\ncuont = 2\n')
    bare = folder / "bare"
    bare.mkdir()
    strange = folder / "strange"
    strange.mkdir()
    (strange / "config.json").write_text('{"model_type": "gpt2"}')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wrong: list[tuple[tuple[object, ...], str]] = [
            (("serve", folder / "none.toml"), "cannot be read"),
            (("serve", config), "did you mean 'count'"),
            (("serve", model, "--port", 0, "pool.cuont=2"), "did you mean 'count'"),
            (("serve", "--port", 0, model, "pool.cuont=2"), "did you mean 'count'"),
            (("generate", "--prompt", "1", model, "--seed", 3, "pool.cuont=2"), "did you mean"),
            (("serve", bare), "config.json cannot be read"),
            (("serve", strange), "pool.engine = 'embedded': model_type 'gpt2' is not supported"),
            (("generate", strange, "--prompt", "1"), "model_type 'gpt2' is not supported"),
            (("serve", model, "--port", port), "choose others"),
            (("serve", model, "--port", 70000), "not a port"),
            (("serve", model, "--api-key", "a\nb"), "--api-key: a key has printable"),
            (("serve", model, "--api-key", "na\u00efve"), "--api-key: a key has printable"),
            (("generate", "--prompt", "1"), "CONFIG"),
            (("generate", model, "--prompt", ""), "has 0 tokens"),
            (("generate", model, "--prompt", "1", "--engine", "vlm"), "there is no engine 'vlm'"),
            (("generate", model, "--prompt", "1", "--temperature", "nan"), "not a temperature"),
        ]

        for arguments, problem in wrong:
            assert status_of(arguments) == 2, arguments
            assert problem in capsys.readouterr().err, arguments


def test_a_folder_that_cannot_be_written_is_a_failure_with_its_cause(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(folder / "tiny")

    assert status_of(("serve", model, "--port", 0, f"run.dir={model}/config.json")) == 1

    assert "a part of that path is a file" in capsys.readouterr().err


def status_of(arguments: tuple[object, ...]) -> object:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:  # argparse
        return end.code


def test_a_model_without_a_tokenizer_is_not_served_though_engines_could(folder: Path) -> None:
    model = save_model(folder / "tiny")
    (model / "tokenizer.json").unlink()

    done = run_umbra(folder, "serve", model, *ECHO, f"run.dir={folder / 'run'}", "--port", 0)

    assert done.returncode == 1, done.stderr
    assert "holds no usable tokenizer" in done.stderr
    assert not list((folder / "sockets").iterdir())


def test_engines_that_cannot_start_are_a_failure_with_its_cause(folder: Path) -> None:
    model = save_model(folder / "tiny")
    write_weight_file(model / "model.safetensors", {"another.model": b"1"})

    done = run_umbra(folder, "generate", model, "--prompt", "1")

    assert done.returncode == 1
    assert "holds 'another.model', which this architecture does not have" in done.stderr
    assert not list((folder / "sockets").iterdir())
