"""`umbra generate --url` asks any server that speaks the API, and says what is wrong with a URL."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from umbra.runtime.cli.main import main


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


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://[::1", "http://no.host.invalid:x"])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--url", url, "--prompt", "1"]) in (1, 2)
    assert "umbra: " in capsys.readouterr().err
