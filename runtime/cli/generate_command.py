"""`umbra generate --url`: requests a completion from a running server."""

from __future__ import annotations

import argparse
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from http.client import HTTPException
from typing import Any, Final

from umbra.runtime.cluster.environment import api_key
from umbra.runtime.errors import ConfigError, ConnectionLost, UmbraError

_SILENCE_S: Final = 600.0
"""Longest wait for the next bytes: a server sends nothing while all its engines start."""


def run(arguments: argparse.Namespace) -> int:
    if arguments.config or arguments.engine:
        raise ConfigError("--url uses a running server: leave out CONFIG and --engine")
    with closing(_answer(arguments.url, _request(arguments))) as texts:
        for text in texts:
            print(text, end="", flush=True)
    print()
    return 0


def _answer(url: str, request: urllib.request.Request) -> Generator[str]:
    try:
        with urllib.request.urlopen(request, timeout=_SILENCE_S) as response:
            yield from _texts(response)
    except urllib.error.HTTPError as error:
        with error:
            message = f"{url} answered {error.code}: {_message(error.read()) or error.reason}"
        raise ConfigError(message) if error.code < 500 else UmbraError(message) from error
    except (OSError, HTTPException) as error:
        raise ConnectionLost(f"cannot reach {url}: {_reason(error)}") from error


def _request(arguments: argparse.Namespace) -> urllib.request.Request:
    body: dict[str, Any] = {"stream": True, "temperature": arguments.temperature}
    if arguments.chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": arguments.prompt}]
    else:
        path = "/v1/completions"
        body["prompt"] = arguments.prompt
    if arguments.pool is not None:
        body["model"] = arguments.pool
    if arguments.max_tokens is not None:
        body["max_tokens"] = arguments.max_tokens
    if arguments.seed is not None:
        body["seed"] = arguments.seed
    headers = {"Content-Type": "application/json"}
    key = api_key(arguments.api_key)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    url = arguments.url.rstrip("/").removesuffix("/v1") + path
    try:
        if url.startswith(("http://", "https://")):
            return urllib.request.Request(url, json.dumps(body).encode(), headers)
    except ValueError:  # not an address
        pass
    raise ConfigError(f"--url {arguments.url!r}: write it as http://HOST:PORT")


def _texts(lines: Iterable[bytes]) -> Iterator[str]:
    """The text in a stream of server-sent events; other servers' extra lines are ignored."""
    has_begun = False
    for line in lines:
        field, _, data = line.strip().partition(b":")
        if field != b"data" or data.strip() == b"[DONE]":
            continue
        has_begun = True
        try:
            texts = _chunk_texts(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UmbraError(f"the server's answer is not a completion: {data[:200]!r}") from None
        yield from texts
    if not has_begun:
        raise UmbraError("the server sent no completion: is it an OpenAI-compatible server?")


def _chunk_texts(chunk: Any) -> list[str]:
    if "error" in chunk:
        raise UmbraError(f"the server failed: {chunk['error']['message']}")
    texts = [
        choice["delta"].get("content") if "delta" in choice else choice["text"]
        for choice in chunk["choices"]
    ]
    return [str(text) for text in texts if text]


def _message(body: bytes) -> str:
    """The message of an error in the API's form; "" for anything else."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return ""


def _reason(error: Exception) -> str:
    """The error without Python's numbers and class names."""
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner)
