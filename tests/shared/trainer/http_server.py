"""`umbra serve` for tests: the command as a process of its own, and a client."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from watching import all_end

_END_S = 60.0
_ANSWER_LIMIT_S = 240.0  # an engine on a GPU may have to be started again first


class Server:
    """A running `umbra serve`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, host: str, port: int) -> None:
        self.process = process
        self.folder = folder
        self.host, self.port = host, port

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str | bytes] | None = None,
        raw: bytes | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON of an answer; POST where there is a body."""
        connection = self._send(path, body, headers, raw)
        try:
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, which has to be one."""
        return self._answer("/v1/completions", body)

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._answer("/v1/chat/completions", body)

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self.ask(path, body)
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    @contextmanager
    def streaming(self, path: str, body: dict[str, Any]) -> Generator[Iterator[Any]]:
        """The chunks of a stream as they come; leaving the block hangs up."""
        connection = self._send(path, {**body, "stream": True}, None, None)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert response.headers["Content-Type"] == "text/event-stream"
        try:
            yield _events(response)
        finally:
            response.close()
            connection.close()

    @contextmanager
    def asking(
        self, path: str, body: object = None, *, raw: bytes | None = None
    ) -> Generator[None]:
        """Asks and waits for no answer; leaving the block hangs up."""
        connection = self._send(path, body, None, raw)
        try:
            yield
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All chunks of a stream that comes to its end."""
        with self.streaming(path, body) as events:
            chunks = list(events)
        assert chunks.pop() == "[DONE]"
        return chunks

    def _send(
        self, path: str, body: object, headers: Mapping[str, str | bytes] | None, raw: bytes | None
    ) -> http.client.HTTPConnection:
        data = json.dumps(body).encode() if body is not None else raw
        connection = http.client.HTTPConnection(self.host, self.port, timeout=_ANSWER_LIMIT_S)
        given = {"Content-Type": "application/json", **(headers or {})}
        connection.request("GET" if data is None else "POST", path, data, given)
        return connection

    def pids(self) -> dict[str, int]:
        return {name: row["pid"] for name, row in self._processes().items()}

    def wait_for_successor(self, name: str) -> None:
        """Until a later incarnation than the first serves."""
        deadline = time.monotonic() + 60.0
        while (row := self._processes()[name])["incarnation"] < 2 or row["state"] != "RUNNING":
            assert time.monotonic() < deadline, row
            time.sleep(0.02)

    def _processes(self) -> dict[str, dict[str, Any]]:
        processes: dict[str, dict[str, Any]] = json.loads(
            (self.folder / "run/serve/processes.json").read_text()
        )
        return processes

    def wait_for_health(self, **wanted: object) -> None:
        """Waits until /health reports it."""
        deadline = time.monotonic() + 60.0
        while True:
            _, health = self.ask("/health")
            if wanted.items() <= health.items():
                return
            assert time.monotonic() < deadline, health
            time.sleep(0.02)

    def end(self, signum: int = signal.SIGINT) -> int:
        """Tells it to end; returns its exit status. Nothing of it may be left."""
        pids = self.pids()
        with all_end(pid for pid in pids.values() if Path(f"/proc/{pid}").exists()):
            self.process.send_signal(signum)
            status = self.process.wait(_END_S)
        deadline = time.monotonic() + _END_S
        while left := list((self.folder / "sockets").iterdir()):
            assert time.monotonic() < deadline, f"sockets were left: {left}"
            time.sleep(0.02)
        return status


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def run_umbra(
    folder: Path, *arguments: object, timeout_s: float = 120.0, stdout: int = subprocess.PIPE
) -> Any:
    """A finished `umbra` command with its output."""
    return subprocess.run(
        _command(*arguments),
        env=_environment(folder),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextmanager
def serving(folder: Path, model: Path, arguments: Sequence[object] = ()) -> Generator[Server]:
    """Starts `umbra serve` on a free port; ends it if the block has not.

    Args:
        folder: for its run directory and sockets; made if missing.
        arguments: such as "pool.count=2", "--api-key", "secret".
    """
    environment = _environment(folder)
    settings = (f"run.dir={folder / 'run'}", "pool.tick_ms=5", "pool.device=cpu", *arguments)
    with (folder / "stderr.txt").open("w") as errors:
        process = subprocess.Popen(
            _command("serve", model, *settings, "--port", 0),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        with process.stdout as output:
            first = output.readline()
            found = re.search(r"http://([\d.]+):(\d+)/v1", first)
            assert found, (first, (folder / "stderr.txt").read_text())
            server = Server(process, folder, found[1], int(found[2]))
            yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(_END_S)


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "umbra.runtime.cli.umbra_command", *map(str, arguments)]


def _environment(folder: Path) -> dict[str, str]:
    (folder / "sockets").mkdir(mode=0o700, parents=True, exist_ok=True)
    return {**os.environ, "UMBRA_SOCKET_ROOT": str(folder / "sockets")}
