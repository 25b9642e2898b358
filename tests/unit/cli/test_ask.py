"""`umbra generate --url` queries any server that has the API, and explains a wrong URL."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from umbra.runtime.cli.umbra_command import main


@contextmanager
def server_of(body: bytes) -> Generator[str]:
    """The URL of one that answers everything with `body`."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_lines_that_are_no_text_are_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    body = (
        b": keep-alive\n\nevent: message\n"
        b'data:{"choices": [{"text": "4"}]}\n\n'
        b'data: {"choices": [{"text": "2"}]}\r\n\r\ndata: [DONE]\n\n'
    )
    with server_of(body) as url:
        status = main(["generate", "--url", url, "--prompt", "6 * 7 ="])

    assert (status, capsys.readouterr().out) == (0, "42\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html></html>", "sent no completion: is it an OpenAI-compatible server?"),
        (b'data: {"id": 3}', "answer is not a completion"),
        (b"data: [3]", "answer is not a completion"),
        (b"data: 42<", "answer is not a completion"),
        (b'data: {"error": {"message": "no engine"}}', "the server failed: no engine"),
    ],
)
def test_what_is_no_completion_is_a_failure(
    body: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with server_of(body) as url:
        status = main(["generate", "--url", url, "--prompt", "1"])

    assert status == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("key", ["a\nb", "na\u00efve", " a"])
def test_a_key_that_no_header_can_hold_is_refused(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["generate", "--url", "http://127.0.0.1:1", "--prompt", "1"]

    assert main([*ask, "--api-key", key]) == 2
    assert "umbra: --api-key: a key has printable" in capsys.readouterr().err
    monkeypatch.setenv("UMBRA_API_KEY", key)
    assert main(ask) == 2
    assert "umbra: UMBRA_API_KEY: a key has printable" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[::1", "http://no.host.invalid:x"])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--url", url, "--prompt", "1"]) in (1, 2)
    assert "umbra: " in capsys.readouterr().err
