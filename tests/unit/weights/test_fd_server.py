"""Descriptors that a process leaves with the server of its node, and others receive there."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from umbra.runtime.errors import ConnectionLost, DeadlineExceeded, WeightSyncError
from umbra.runtime.process.host_memory import create_memory, map_memory, refusal
from umbra.runtime.weights.image import fd_server
from umbra.runtime.weights.image.fd_server import (
    MAX_FDS,
    FdDeposit,
    FdServer,
    close_deposits,
    received_deposit,
    serve_fds,
)

LIMIT_S = 5.0


@contextmanager
def numbered_fds(num: int) -> Generator[list[int]]:
    """Descriptors of files of which each has its index as its size."""
    fds = [os.memfd_create(f"{idx}", os.MFD_CLOEXEC) for idx in range(num)]
    try:
        for idx, fd in enumerate(fds):
            os.ftruncate(fd, idx)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def sizes_at(path: str, name: str, num: int) -> list[int]:
    """Sizes of the files of a deposit, received in portions."""
    sizes: list[int] = []
    for first in range(0, num, MAX_FDS):
        portion = min(MAX_FDS, num - first)
        with received_deposit(path, name, first, portion, LIMIT_S) as fds:
            assert not any(os.get_inheritable(fd) for fd in fds)
            sizes += [os.fstat(fd).st_size for fd in fds]
    return sizes


def with_server(path: str, work: Callable[[FdServer], Awaitable[None]]) -> None:
    async def body() -> None:
        async with serve_fds(path, {"offered": 0}) as server, asyncio.timeout(20.0):
            await work(server)

    asyncio.run(body())


def deposit(path: str, name: str, *portions: Sequence[int]) -> FdDeposit:
    made = FdDeposit(path, name, LIMIT_S)
    try:
        for fds in portions:
            made.add(fds)
    except BaseException:
        made.close()
        raise
    return made


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_arrive_in_order_over_several_portions(tmp_path: Path) -> None:
    path, num = str(tmp_path / "fds"), 2 * MAX_FDS + 100

    async def work(server: FdServer) -> None:
        with numbered_fds(num) as fds:
            portions = [fds[idx : idx + 150] for idx in range(0, num, 150)]
            kept = await asyncio.to_thread(deposit, path, "chunks", *portions)
        assert server.num_deposited == num
        for _ in range(2):
            assert await asyncio.to_thread(sizes_at, path, "chunks", num) == list(range(num))
        await asyncio.to_thread(kept.close)

    with_server(path, work)


def test_a_deposit_ends_with_its_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(4) as fds:
            kept, other = [
                await asyncio.to_thread(deposit, path, name, fds) for name in ("chunks", "others")
            ]
        num_before = num_open()
        assert kept.is_kept

        await asyncio.to_thread(kept.close)

        assert num_open() == num_before - 6  # four, and both ends of the connection
        assert not kept.is_kept
        with pytest.raises(WeightSyncError, match="no deposited descriptors of that name"):
            await asyncio.to_thread(sizes_at, path, "chunks", 4)
        assert await asyncio.to_thread(sizes_at, path, "others", 4) == [0, 1, 2, 3]
        kept.close()
        await asyncio.to_thread(other.close)
        assert server.num_deposited == 0

    with_server(path, work)


def test_deposits_end_with_the_server_and_the_depositor_notices(tmp_path: Path) -> None:
    path, kept = str(tmp_path / "fds"), list[FdDeposit]()

    async def work(server: FdServer) -> None:
        with numbered_fds(3) as fds:
            kept.append(await asyncio.to_thread(deposit, path, "chunks", fds))
        assert kept[0].is_kept

    with_server(path, work)

    assert not kept[0].is_kept
    with numbered_fds(1) as fds, pytest.raises(ConnectionLost):
        kept[0].add(fds)
    kept[0].close()


@pytest.mark.parametrize("name", ["chunks", "offered"])
def test_a_name_that_is_in_use_is_refused(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(3) as fds:
            kept = await asyncio.to_thread(deposit, path, "chunks", fds)
            with pytest.raises(WeightSyncError, match="the name is in use"):
                await asyncio.to_thread(deposit, path, name, fds[:1])
        assert await asyncio.to_thread(sizes_at, path, "chunks", 3) == [0, 1, 2]
        await asyncio.to_thread(kept.close)

    with_server(path, work)


def test_a_deposit_that_is_smaller_than_expected_is_no_deposit(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(3) as fds:
            kept = await asyncio.to_thread(deposit, path, "chunks", fds)
        num_before = num_open()
        with pytest.raises(WeightSyncError, match="2 descriptors are missing"):
            await asyncio.to_thread(sizes_at, path, "chunks", 5)
        assert num_open() == num_before
        await asyncio.to_thread(kept.close)

    with_server(path, work)


def test_a_server_that_does_not_answer_holds_up_all_deposits_for_the_time_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now_s = str(tmp_path / "fds"), 0.0

    class Unanswered(FdDeposit):
        """Waits on the clock of the test, to the end."""

        def close(self, timeout_s: float = 0.0) -> None:
            nonlocal now_s
            now_s += timeout_s
            super().close(0.001)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        deposits = [Unanswered(path, f"chunks-{idx}", LIMIT_S) for idx in range(6)]
        monkeypatch.setattr(fd_server, "time", SimpleNamespace(monotonic=lambda: now_s))

        close_deposits(deposits)

    assert now_s == pytest.approx(fd_server._CLOSE_TIMEOUT_S, rel=0.01)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def soft_limit(num: int, kind: int = resource.RLIMIT_NOFILE) -> Generator[None]:
    """Of the files that this process may open, or of another resource."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (num, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def limit_with_room_for(num: int) -> int:
    """A limit with which this process may open so many files."""
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(free, num, None))


def next_fd() -> int:
    """The number that the next descriptor gets: a limit with which this process may open none."""
    fd = os.dup(0)
    os.close(fd)
    return fd


def test_memory_without_a_descriptor_names_the_limit() -> None:
    with (
        soft_limit(next_fd()),
        pytest.raises(WeightSyncError, match=r"memory: too many open files: raise ulimit -n$"),
    ):
        create_memory("image", 4096)


def test_a_mapping_beyond_the_limit_of_addresses_names_the_limit() -> None:
    fd = create_memory("image", 1 << 30, is_allocated=False)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        with (
            soft_limit(in_use + (64 << 20), resource.RLIMIT_AS),
            pytest.raises(
                WeightSyncError, match=r"cannot map 1073741824 .*: ulimit -v allows a .* "
            ),
        ):
            map_memory(fd, 1 << 30)
    finally:
        os.close(fd)


def test_memory_that_the_kernel_does_not_commit_names_overcommitment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/overcommit_memory").write_text("2\n")
    (tmp_path / "meminfo").write_text("CommitLimit:    1048576 kB\nCommitted_AS:    524288 kB\n")

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as the kernel does then

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(WeightSyncError, match=r"4096 bytes of shared memory: the system has no"):
        create_memory("image", 4096)

    for number in (errno.ENOSPC, errno.EFAULT):  # of a file, and of a mapping
        why = refusal(OSError(number, ""), tmp_path)
        assert why.startswith("vm.overcommit_memory is 2, and 512.0 MiB of 1.0 GiB are committed: ")


def test_a_server_that_may_not_open_more_files_refuses_and_closes_all(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(100) as fds:
            kept = await asyncio.to_thread(deposit, path, "chunks", fds[:1])
            with (
                soft_limit(limit_with_room_for(20)),
                pytest.raises(WeightSyncError, match="may not open that many"),
            ):
                await asyncio.to_thread(kept.add, fds)
        await asyncio.to_thread(kept.close)
        assert server.num_deposited == 0

    with_server(path, work)


def test_deposits_leave_half_of_its_descriptors_to_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        limit = 2 * max(map(int, os.listdir("/proc/self/fd"))) + 400
        with numbered_fds(1) as fds, soft_limit(limit):
            kept = await asyncio.to_thread(deposit, path, "chunks", fds * 100)
            too_many = [fds * 100] * (limit // 200)
            with pytest.raises(WeightSyncError, match=f"more than half of the {limit} files"):
                await asyncio.to_thread(deposit, path, "others", *too_many)
            assert server.num_deposited == 100
        await asyncio.to_thread(kept.close)

    with_server(path, work)


def test_connections_of_deposits_count_as_files_of_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        limit = 2 * max(map(int, os.listdir("/proc/self/fd"))) + 200
        with numbered_fds(1) as fds, soft_limit(limit):
            made = [
                await asyncio.to_thread(deposit, path, f"{idx}", fds) for idx in range(limit // 4)
            ]
            with pytest.raises(WeightSyncError, match=f"more than half of the {limit} files"):
                await asyncio.to_thread(deposit, path, "one more", fds)
            assert server.num_deposited == limit // 4
        for each in made:
            await asyncio.to_thread(each.close)

    with_server(path, work)


def test_a_server_that_may_not_open_more_files_accepts_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(1) as fds, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(LIMIT_S)
            with soft_limit(next_fd()):
                client.connect(path)
                while "cannot accept a descriptor client" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            socket.send_fds(client, [b"keep chunks"], fds)
            assert await asyncio.to_thread(client.recv, 100) == b"ok"

    with_server(path, work)


def test_a_client_that_may_not_open_more_files_has_an_error_of_the_connection(
    tmp_path: Path,
) -> None:
    with soft_limit(next_fd()), pytest.raises(ConnectionLost, match="Too many open"):
        FdDeposit(str(tmp_path / "fds"), "chunks", LIMIT_S)


def test_a_deposit_whose_answer_came_too_late_ends_with_its_server(tmp_path: Path) -> None:
    path, was_closed_first = str(tmp_path / "fds"), list[bool]()
    is_late, is_closed = threading.Event(), threading.Event()

    def answer_late(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.recv(100)
            is_late.wait(LIMIT_S)
            client.send(b"ok")
            assert client.recv(100) == b""
            was_closed_first.append(is_closed.wait(0.1))

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, numbered_fds(1) as fds:
        listener.bind(path)
        listener.listen()
        server = threading.Thread(target=answer_late, args=(listener,))
        server.start()
        kept = FdDeposit(path, "chunks", 0.5)
        with pytest.raises(DeadlineExceeded):
            kept.add(fds)
        is_late.set()

        kept.close()

        is_closed.set()
        server.join()
    assert was_closed_first == [False]


def test_only_a_depositor_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fd_server, "_ANSWER_TIMEOUT_S", 0.05)
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(2) as fds, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            kept = await asyncio.to_thread(deposit, path, "chunks", fds)
            silent.settimeout(LIMIT_S)
            silent.connect(path)
            assert await asyncio.to_thread(silent.recv, 1) == b""
        assert "dropped a descriptor client: no request in time" in caplog.text
        assert kept.is_kept
        assert await asyncio.to_thread(sizes_at, path, "chunks", 2) == [0, 1]
        await asyncio.to_thread(kept.close)

    with_server(path, work)


@pytest.mark.parametrize("request_", [b"keep ", b"keep x", b"get no", b"chunks", b"fetch x y"])
def test_descriptors_of_a_malformed_request_are_closed(tmp_path: Path, request_: bytes) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(3) as fds, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(LIMIT_S)
            client.connect(path)
            num_before = num_open()
            socket.send_fds(client, [request_], [] if request_ == b"keep x" else fds)
            assert await asyncio.to_thread(client.recv, 100) not in (b"", b"ok")
            assert await asyncio.to_thread(client.recv, 100) == b""
            assert num_open() <= num_before
        assert server.num_deposited == 0

    with_server(path, work)


def test_a_connection_has_one_name(tmp_path: Path) -> None:
    path = str(tmp_path / "fds")

    async def work(server: FdServer) -> None:
        with numbered_fds(3) as fds, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(LIMIT_S)
            client.connect(path)
            socket.send_fds(client, [b"keep one"], fds)
            assert await asyncio.to_thread(client.recv, 100) == b"ok"
            socket.send_fds(client, [b"keep two"], fds)
            assert b"under one name" in await asyncio.to_thread(client.recv, 100)
            assert await asyncio.to_thread(client.recv, 100) == b""
        assert server.num_deposited == 0

    with_server(path, work)
