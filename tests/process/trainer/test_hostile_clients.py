"""Whatever a client sends, the server stays as it was, and other clients get their answers."""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_server import Server, serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from training_models import save_model

pytestmark = [pytest.mark.process, pytest.mark.slow]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CONTEXT_LEN = 4096
MAX_TOKEN_NBYTES = 1200  # so large that tokenizing the largest prompt takes a second
MAX_PROMPT_NBYTES = CONTEXT_LEN * MAX_TOKEN_NBYTES
BODY_NBYTES = 8 << 20
SMALL = {"prompt": "12+3=", "max_tokens": 1}
_MANY: dict[str, tuple[str, bytes]] = {
    "lists": (COMPLETIONS, b'{"prompt":[%s[]]}' % (b"[]," * (BODY_NBYTES // 3 - 20))),
    "maps": (COMPLETIONS, b'{"prompt":[%s{}]}' % (b"{}," * (BODY_NBYTES // 3 - 20))),
    "texts": (COMPLETIONS, b'{"prompt":[%s""]}' % (b'"",' * (BODY_NBYTES // 3 - 20))),
    "numbers": (COMPLETIONS, b'{"prompt":[%s1]}' % (b"1," * (BODY_NBYTES // 2 - 20))),
    "messages": (CHAT, b'{"messages":[%s{}]}' % (b"{}," * (BODY_NBYTES // 3 - 20))),
}


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with serving_bytes() as server:
        front = server.pids()["front"]
        yield server
        assert server.pids()["front"] == front, "it was replaced"
        assert server.end() == 0


@contextmanager
def serving_bytes(*arguments: str) -> Generator[Server]:
    """A server of a model whose tokens are bytes. No model is run: no test asks for its text."""
    # Not below pytest's folder: a socket's path may have 100 bytes.
    with tempfile.TemporaryDirectory(prefix="umbra-test-", dir="/tmp") as name:
        folder = Path(name)
        model = save_model(folder / "tiny", vocab_size=300, max_position_embeddings=CONTEXT_LEN)
        save_byte_tokenizer(model / "tokenizer.json")
        echo = ("pool.engine=echo", "pool.engine_args.vocab_size=300")
        with serving(folder, model, [*echo, *arguments]) as server:
            yield server


def save_byte_tokenizer(path: Path) -> None:
    """One token a byte, and one of many."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<eos>", *alphabet]
    tokenizer: Any = Tokenizer(models.BPE({token: idx for idx, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.add_tokens(["x" * MAX_TOKEN_NBYTES])
    tokenizer.save(str(path))


def resident_mib(pid: int, what: str = "VmRSS") -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(what))
    return int(line.split()[1]) >> 10


def processor_s(pid: int) -> float:
    """What the process has used so far, with all its threads."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_prompt_too_large_for_the_context_is_refused_before_it_is_tokenized(
    server: Server,
) -> None:
    """Refusing three costs less processor time than tokenizing one."""
    text, front = "1" * (MAX_PROMPT_NBYTES + 1), server.pids()["front"]
    start_s = processor_s(front)
    answers = [
        server.ask(COMPLETIONS, {"prompt": text}),
        server.ask(COMPLETIONS, {"prompt": ["1", text]}),
        server.ask(CHAT, {"messages": [{"role": "user", "content": text}]}),
    ]
    refused_s = processor_s(front)

    status, fits = server.ask(COMPLETIONS, {"prompt": text[:-1]})
    tokenized_s = processor_s(front)

    for (found, answer), param in zip(answers, ("prompt", "prompt", "messages"), strict=True):
        error = answer["error"]
        assert (found, error["param"]) == (400, param), answer
        assert error["code"] == "context_length_exceeded"
        for number in (CONTEXT_LEN, MAX_PROMPT_NBYTES, MAX_TOKEN_NBYTES):
            assert str(number) in error["message"]
    assert f"prompt of {MAX_PROMPT_NBYTES + 1} bytes" in answers[0][1]["error"]["message"]
    assert status == 400
    assert f"{MAX_PROMPT_NBYTES} tokens" in fits["error"]["message"]
    assert refused_s - start_s < tokenized_s - refused_s


def test_a_long_prompt_that_fits_is_answered(server: Server) -> None:
    long = server.complete(prompt="x" * MAX_TOKEN_NBYTES * (CONTEXT_LEN - 1), max_tokens=1)

    assert long["usage"]["prompt_tokens"] == CONTEXT_LEN - 1


def test_other_clients_do_not_wait_while_the_largest_prompt_is_tokenized(server: Server) -> None:
    num_answered = 0
    large = {"prompt": "1" * MAX_PROMPT_NBYTES}

    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.ask, COMPLETIONS, large)
        while not asked.done():
            server.complete(**SMALL)
            num_answered += 1

    assert asked.result()[0] == 400
    assert num_answered > 3, "the first of them may wait, and the last comes after the large one"


def test_memory_falls_back_after_a_burst_of_large_requests(server: Server) -> None:
    front = server.pids()["front"]
    before = resident_mib(front)
    large = {"prompt": "1" * MAX_PROMPT_NBYTES}

    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(server.ask, COMPLETIONS, large) for _ in range(3)]
        asked += [clients.submit(server.ask, path, raw=raw) for path, raw in _MANY.values()]
    assert {call.result()[0] for call in asked} == {400}

    assert resident_mib(front, "VmHWM") > before + 300, "it was no burst"
    deadline = time.monotonic() + 60.0
    while resident_mib(front) > before + 120:
        assert time.monotonic() < deadline, (before, resident_mib(front))
        time.sleep(0.05)


@pytest.mark.parametrize("shape", _MANY)
def test_millions_of_values_are_refused_at_once(server: Server, shape: str) -> None:
    path, body = _MANY[shape]
    began_s = time.monotonic()

    status, answer = server.ask(path, raw=body)

    assert status == 400, answer
    assert len(answer["error"]["message"]) < 300
    assert time.monotonic() - began_s < 30.0


def test_requests_under_way_take_so_much_memory_and_no_more() -> None:
    settings = ("vocab_size=1_000_000", "tokens_per_s=20")  # no stop comes for 200 seconds
    slow = [f"pool.engine_args.{setting}" for setting in settings]
    body = json.dumps({"prompt": "1", "max_tokens": 4000}).encode().ljust(BODY_NBYTES)

    with serving_bytes(*slow) as server:
        with ExitStack() as clients:
            for _ in range(64):
                clients.enter_context(server.asking(COMPLETIONS, raw=body))
            server.wait_for_health(generations=64)
            refused, answer = server.ask(COMPLETIONS, raw=body)
        server.wait_for_health(generations=0)
        taken, _ = server.ask(COMPLETIONS, raw=body.replace(b"4000", b"   1"))
        assert server.end() == 0

    assert (refused, answer["error"]["type"]) == (429, "rate_limit_error")
    assert f"{64 * BODY_NBYTES} of at most {64 * BODY_NBYTES}" in answer["error"]["message"]
    assert taken == 200


def test_bodies_count_before_they_have_arrived(server: Server) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    length = f"Content-Length: {BODY_NBYTES}\r\n\r\n"
    all_but_the_last_byte = (head + length).encode() + b" " * (BODY_NBYTES - 1)

    with ExitStack() as stack:
        clients: list[socket.socket] = []
        for _ in range(70):
            client = socket.create_connection((server.host, server.port), timeout=30.0)
            stack.enter_context(client).sendall(all_but_the_last_byte)
            clients.append(client)
        deadline = time.monotonic() + 60.0
        while len(answered := select.select(clients, [], [], 0.05)[0]) < 6:
            assert time.monotonic() < deadline, len(answered)
        answers = [client.recv(1000) for client in answered]

    assert [answer.split(maxsplit=2)[1] for answer in answers] == [b"429"] * 6
    deadline = time.monotonic() + 60.0
    while server.ask(COMPLETIONS, raw=json.dumps(SMALL).encode().ljust(BODY_NBYTES))[0] != 200:
        assert time.monotonic() < deadline, "they still count"


def test_only_its_own_names_and_addresses_reach_a_server_without_a_key(server: Server) -> None:
    port = server.port
    found = {
        host: server.ask(COMPLETIONS, SMALL, headers={"Host": host})[0]
        for host in ("evil.example", f"evil.example:{port}", f"localhost:{port}", f"[::1]:{port}")
    }

    assert list(found.values()) == [403, 403, 200, 200]
    assert server.ask("/health", headers={"Host": "evil.example"})[0] == 403


def test_a_server_that_ends_tells_a_client_whose_prompt_is_being_tokenized() -> None:
    """One thread tokenizes three prompts, in seconds. The end comes during the first, or on a slow
    machine during one of the next."""
    large = {"prompt": "1" * MAX_PROMPT_NBYTES}
    with serving_bytes() as server, ThreadPoolExecutor(3) as threads:
        front = server.pids()["front"]
        before = resident_mib(front)
        asked = [threads.submit(server.ask, COMPLETIONS, large) for _ in range(3)]
        while resident_mib(front) < before + 50:
            assert not all(call.done() for call in asked)
        assert server.end() == 0

    answers = [(status, answer["error"]["code"]) for status, answer in (c.result() for c in asked)]
    assert (503, "shutting_down") in answers
    assert {*answers} <= {(503, "shutting_down"), (400, "context_length_exceeded")}


def test_packed_bodies_are_not_unpacked(server: Server) -> None:
    body = json.dumps(SMALL).encode()

    status, answer = server.ask(COMPLETIONS, raw=body, headers={"Content-Encoding": "gzip"})

    assert (status, "uncompressed" in answer["error"]["message"]) == (415, True)


def test_a_chat_template_of_the_clients_own_is_not_run(server: Server) -> None:
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    chat = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1}

    status, answer = server.ask(CHAT, {**chat, "chat_template_kwargs": {"chat_template": loop}})

    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
    assert server.chat(**chat)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff", b'{"prompt":"\xff"}', b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"\\ud800"}',
        b'{"prompt":"1","stop":"\\ud800"}', b'{"prompt":' + b"[" * 100_000,
        b'{"prompt":"1","logit_bias":' + b"[" * 150 + b"]" * 150 + b"}",
        b'{"prompt":"1","temperature":NaN}', b'{"prompt":"1","temperature":1e999}',
        b'{"prompt":"1","temperature":%s}' % (b"9" * 400), b'{"prompt":"1","n":%s}' % (b"9" * 400),
        b'{"prompt":"1","max_tokens":18446744073709551616}', b'{"prompt":[18446744073709551616]}',
        b'{"prompt":"1","seed":18446744073709551616}', b'{"prompt":"1","n":%s}' % (b"9" * 5000),
        b'{"prompt":"1","stop_token_ids":[18446744073709551616]}',
    ],
    ids=lambda body: body[:40],
)  # fmt: skip
def test_what_is_no_request_is_the_clients_error(server: Server, body: bytes) -> None:
    status, answer = server.ask(COMPLETIONS, raw=body)

    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_malformed_http_leaves_nothing_in_the_log(server: Server) -> None:
    log = server.folder / "run/serve/logs/front.log"
    size_nbytes = os.path.getsize(log)

    for _ in range(100):
        with socket.create_connection((server.host, server.port), timeout=30.0) as client:
            client.sendall(b"GET /health HTTP/9.9\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.0 400")

    assert os.path.getsize(log) - size_nbytes < 1000, log.read_text()[-3000:]
