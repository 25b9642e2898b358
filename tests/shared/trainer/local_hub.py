"""A Hugging Face hub for tests: serves folders over HTTP, as huggingface_hub and datasets ask for
them, and counts the requests.

    FOLDER/models/ORG/NAME/...     FOLDER/datasets/ORG/NAME/...
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class LocalHub:
    """A running hub. `requests` has METHOD and path of each request, oldest first."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self.requests: list[str] = []

    def downloads(self) -> list[str]:
        """The names of the files that were sent, sorted."""
        gets = (each.partition(" ") for each in self.requests)
        return sorted(
            path.rpartition("/")[2]
            for method, _, path in gets
            if method == "GET" and "/resolve/" in path
        )

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that uses this hub, and a cache in `home`."""
        return os.environ | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def answer(self, path: str) -> tuple[Any, str]:
        """JSON or the path of a file, and the commit; None for what is not there."""
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            return self._answer_api(parts[1], "/".join(parts[2:4]), parts[4:])
        kind = "datasets" if parts[0] == "datasets" else "models"
        org, name, resolve, _, *rest = parts[1:] if kind == "datasets" else parts
        file = self.folder / kind / org / name / "/".join(rest)
        if resolve != "resolve" or not file.is_file():
            return None, ""
        return file, _commit(self.folder / kind / org / name)

    def _answer_api(self, kind: str, repo: str, rest: list[str]) -> tuple[Any, str]:
        folder = self.folder / kind / repo
        if not folder.is_dir():
            return None, ""
        commit = _commit(folder)
        if not rest or rest[0] == "revision":
            return {"id": repo, "sha": commit, "siblings": []}, commit
        below = folder / "/".join(rest[2:])
        if rest[0] != "tree" or not below.is_dir():
            return None, ""
        return [_entry(folder, file) for file in sorted(below.rglob("*"))], commit


def _entry(folder: Path, file: Path) -> dict[str, Any]:
    kind = "directory" if file.is_dir() else "file"
    size = 0 if file.is_dir() else file.stat().st_size
    oid = hashlib.sha1(str(file).encode()).hexdigest()
    return {"type": kind, "path": str(file.relative_to(folder)), "size": size, "oid": oid}


def _commit(folder: Path) -> str:
    digest = hashlib.sha1()
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()


@contextmanager
def serve_hub(folder: Path) -> Generator[LocalHub]:
    """Serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self) -> None:
            path = unquote(urlsplit(self.path).path)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {path}")
            found, commit = hub.answer(path)
            answer = {"error": "not found"} if found is None else found
            body = found.read_bytes() if isinstance(found, Path) else json.dumps(answer).encode()
            self.send_response(200 if found is not None else 404)
            if found is None:
                is_file = "/resolve/" in path
                self.send_header("X-Error-Code", "EntryNotFound" if is_file else "RepoNotFound")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = _send

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = LocalHub(folder, server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10.0)
