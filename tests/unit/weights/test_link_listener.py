"""Connections of links, among strangers and where threads cannot be started."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from umbra.runtime.process.host_memory import unmap
from umbra.runtime.weights.image.fd_server import serve_fds
from umbra.runtime.weights.image.mapped_image import MappedImage
from umbra.runtime.weights.image.sync_progress import SyncProgress
from umbra.runtime.weights.links import link_sender
from umbra.runtime.weights.links.link_sender import LinkListener
from umbra.runtime.weights.links.weight_links import LinkConnection, NodeReceiver
from umbra.runtime.weights.manifest import BucketGrid

KEY = "k" * 32
LIMIT_S = 10.0


class Link:
    """A link that reads one frame more from its connection."""

    def __init__(self) -> None:
        self.received = b""
        self.closed = ""
        self.has_ended = threading.Event()

    def run(self, connection: LinkConnection) -> None:
        self.received = connection.receive_frame()
        connection.close()
        self.has_ended.set()

    def close(self, reason: str = "") -> None:
        self.closed = reason
        self.has_ended.set()


@pytest.fixture
def listener() -> Generator[LinkListener]:
    listener = LinkListener("127.0.0.1")
    yield listener
    listener.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "links"]


def serve(listener: LinkListener, *keys: str) -> list[Any]:
    links: list[Any] = [Link() for _ in keys]
    listener.serve(dict(zip(keys, links, strict=True)), time.monotonic() + LIMIT_S)
    return links


def connect(listener: LinkListener, *parts: bytes) -> socket.socket:
    host, port = listener.endpoint.rsplit(":", 1)
    stream = socket.create_connection((host, int(port)), LIMIT_S)
    for part in parts:
        stream.sendall(part)
    return stream


def frame(data: str) -> bytes:
    return bytes([len(data)]) + data.encode()


def test_a_link_is_served_among_strangers_who_hold_no_thread(listener: LinkListener) -> None:
    (link,) = serve(listener, KEY)
    num_threads = threading.active_count()

    strangers = [
        connect(listener, begin) for begin in (b"", b"\x20", b"\x20kkk") for _ in range(20)
    ]
    with connect(listener, frame(KEY)[:5], frame(KEY)[5:] + frame("more")):
        assert link.has_ended.wait(LIMIT_S)
    held = threading.active_count() - num_threads
    listener.close()

    assert link.received == b"more"
    assert held <= 1, "that of the link may not have ended"
    assert [stranger.recv(1) for stranger in strangers] == [b""] * 60
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("sent", [frame("x" * 32), frame(""), frame(KEY[:-1])])
def test_a_connection_with_another_key_is_closed(listener: LinkListener, sent: bytes) -> None:
    (link,) = serve(listener, KEY)

    with connect(listener, sent) as stranger:
        assert stranger.recv(1) == b""

    assert not link.has_ended.is_set()


def test_a_key_is_good_for_one_connection(listener: LinkListener) -> None:
    (link,) = serve(listener, KEY)

    with connect(listener, frame(KEY), frame("one")), connect(listener, frame(KEY)) as second:
        assert second.recv(1) == b""
        assert link.has_ended.wait(LIMIT_S)

    assert link.received == b"one"


def test_the_oldest_stranger_makes_room(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_sender, "_MAX_UNNAMED", 2)
    (link,) = serve(listener, KEY)

    with connect(listener) as oldest, connect(listener) as other:
        with connect(listener, frame(KEY), frame("")):
            assert link.has_ended.wait(LIMIT_S)
            assert oldest.recv(1) == b""
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_a_connection_that_names_no_link_is_closed_in_time(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_sender, "_KEY_LIMIT_S", 0.05)
    serve(listener, KEY)

    with connect(listener, b"\x20k") as stranger:
        assert stranger.recv(1) == b""


def test_a_thread_that_cannot_be_started_costs_its_link_only(
    listener: LinkListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = serve(listener, KEY, "other")

    def fail(thread: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with connect(listener, frame(KEY)), connect(listener, frame("other"), frame("more")):
        assert first.has_ended.wait(LIMIT_S)
        assert second.has_ended.wait(LIMIT_S)

    assert first.closed == "no thread could be started for it: can't start new thread"
    assert second.received == b"more"


def test_a_receiver_names_the_first_of_its_failed_links_and_leaves_nothing_mapped(
    tmp_path: Path,
) -> None:
    fd, progress = SyncProgress.create("receiver", 2, 1)
    progress.close()
    failures = threading.Semaphore(0)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ranks = [(rank, f"127.0.0.1:{each.getsockname()[1]}") for rank, each in enumerate(listeners)]
    path = str(tmp_path / "fds")
    block = {"name": "block", "num_ranks": 2, "num_engines": 1, "timeout_s": LIMIT_S}
    receives = {"key": KEY, "holds": "", "ranks": ranks}

    async def receive() -> NodeReceiver:
        wire = {"fd_socket": path, "progress": block, "receives": receives}
        image = MappedImage(fd, 256)
        async with serve_fds(path, {"block": fd}):
            return await asyncio.to_thread(
                NodeReceiver, image, BucketGrid(256, 256), wire, LIMIT_S, failures.release
            )

    receiver = asyncio.run(receive())
    for listener in reversed(listeners):
        stream, _ = listener.accept()
        stream.close()
        listener.close()
        assert failures.acquire(timeout=LIMIT_S)
    num_mapped = mappings("receiver")
    receiver.close()

    assert "bucket 0 of 1 did not arrive from rank 1: " in receiver.error
    assert (num_mapped, mappings("receiver")) == (2, 1)  # the image stays with its owner
    unmap(receiver.image.memory)
    os.close(fd)


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")
