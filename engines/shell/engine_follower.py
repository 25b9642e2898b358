"""A follower: the actor of an engine's part on another node than the leading part's.

    leading part (engine's actor) ── follow ──▶ EngineFollower
                                                  └ program of the engine's library, and its workers
                ── open_image, write_image ──▶  memory from which the workers load an update

The program runs as long as the leading part holds the stream. If the leading part ends, on purpose
or not, the follower kills the program and waits for the next one. If the program ends, so does the
follower, whose supervisor restarts it; the pool then kills the leading part.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import socket
import struct
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from umbra.engines.loading.weight_source import filled_image
from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.errors import ConfigError, DeadlineExceeded, EngineError, WeightSyncError
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.process.host_memory import create_memory
from umbra.runtime.rpc.rpc_client import Handle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_IMAGE: Final = "umbra-weights"
_START_LIMIT_S: Final = 120.0
# Time for a follower's process and its program to start. All parts of an engine are started at
# once; a follower that was killed is back after its restart delay.
_CALL_LIMIT_S: Final = 60.0
_IMAGE_LIMIT_S: Final = 600.0
# Memory as large as the model: a machine may take 2.5 s for each GB that it has never used.
_CHUNK_NBYTES: Final = 16 << 20
# The follower does nothing else while it copies a chunk, which takes milliseconds.
_SIOCGIFADDR: Final = 0x8915


class EngineFollower:
    """Owns the running program, one at a time, and the image of the weights."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._failed = asyncio.Event()
        self._failure = ""
        self._image_fd = -1
        self._image: mmap.mmap | None = None

    async def follow(
        self, program: str, options: Mapping[str, Any], variables: Mapping[str, str]
    ) -> AsyncGenerator[int, None]:
        """Runs a program until the caller leaves the stream or is lost. Yields its pid. `program`
        is a module that reads JSON from its standard input: `options` for this part, `variables`
        for its environment, this node's "address", and the job's "folder" for sockets."""
        context = actor_context()
        task = {
            "options": options,
            "variables": variables,
            "address": context.tcp_host,
            "folder": str(context.job_folder),
        }
        async with self._turn:  # the loss of the last caller may just have been noticed
            child = ChildProcess.spawn(
                f"{context.name}#{context.incarnation}",
                [sys.executable, "-m", program],
                stdin_payload=json.dumps(task).encode(),
            )
            try:
                async with child:
                    yield child.pid
                    await child.wait()
            finally:
                self.close_image()
            self._failure = f"the program of this follower has ended: {child.describe_end()}"
            self._failed.set()

    async def open_image(self, nbytes: int) -> str:
        if self._image is None or len(self._image) != nbytes:
            self.close_image()
            loop = asyncio.get_running_loop()
            making = loop.run_in_executor(None, create_memory, _IMAGE, nbytes)  # takes seconds
            try:  # shielded: the descriptor of a thread that nobody waits for would stay open
                self._image_fd = await asyncio.shield(making)
            except asyncio.CancelledError:
                with suppress(WeightSyncError):
                    os.close(await making)
                raise
            self._image = mmap.mmap(self._image_fd, nbytes)
        return f"/proc/{os.getpid()}/fd/{self._image_fd}"

    def write_image(self, offset: int, data: NDArray[np.uint8]) -> None:
        if self._image is None:
            raise WeightSyncError("there is no image to write to; open_image comes first")
        self._image[offset : offset + data.nbytes] = data.data

    def close_image(self) -> None:
        if self._image is not None:
            self._image.close()
            os.close(self._image_fd)
            self._image = None

    async def run(self) -> None:
        """Raises EngineError when a program has ended by itself."""
        await self._failed.wait()
        raise EngineError(self._failure)


class FollowerGroup:
    """The followers of an engine on several nodes. Owned and closed by the engine's core."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._streams = AsyncExitStack()
        self._handles: list[Handle] = []

    async def start(
        self, program: str, options: Sequence[Mapping[str, Any]], variables: Mapping[str, str]
    ) -> None:
        """Starts a program on each follower's node, with its own options; see
        `EngineFollower.follow`. The programs' ends need no watch: the supervisor kills this process
        when a follower ends."""
        context = actor_context()
        for name, own in zip(self.names, options, strict=True):
            follower = context.client.handle(await context.resolve(name, _START_LIMIT_S))
            stream = follower.stream("follow", program, own, variables, timeout_s=None)
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    pids = await self._streams.enter_async_context(stream)
                    await anext(pids)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the follower {name} has not started its program within "
                    f"{_START_LIMIT_S:g} s: see its log"
                ) from None
            self._handles.append(follower)

    async def start_parts(
        self,
        program: str,
        options: Mapping[str, Any],
        variables: Mapping[str, str],
        *,
        host_variable: str,
        part_options: Callable[[int, str, int], dict[str, Any]],
    ) -> dict[str, Any]:
        """Starts a library's parts on the followers' nodes; returns this part's extra options. The
        library reads this node's address from `host_variable`. `part_options` takes a part's number
        (0 here), and the address and port at which all meet."""
        address = own_address()
        port = _free_port(address)
        for name, value in ({host_variable: address} | network_variables(address)).items():
            os.environ.setdefault(name, value)
        own, *others = (part_options(part, address, port) for part in range(len(self.names) + 1))
        await self.start(program, [{**options, **more} for more in others], variables)
        return own

    async def send_image(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """Copies the image, once filled, to all followers; returns the description
        with their paths."""
        if not self._handles:
            return dict(description)
        image = await asyncio.to_thread(filled_image, description)
        try:
            async with asyncio.TaskGroup() as tasks:
                sent = [tasks.create_task(_send(image, handle)) for handle in self._handles]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        paths = [description.get("path", ""), *(task.result() for task in sent)]
        return {**description, "nbytes": image.nbytes, "paths": paths}

    async def close_images(self) -> None:
        for handle in self._handles:
            await handle.call("close_image", timeout_s=_CALL_LIMIT_S)

    async def close(self) -> None:
        await self._streams.aclose()


async def _send(image: NDArray[np.uint8], follower: Handle) -> str:
    path: str = await follower.call("open_image", image.nbytes, timeout_s=_IMAGE_LIMIT_S)
    for offset in range(0, image.nbytes, _CHUNK_NBYTES):
        part = image[offset : offset + _CHUNK_NBYTES]
        await follower.call("write_image", offset, part, timeout_s=_CALL_LIMIT_S)
    return path


def own_address() -> str:
    if address := actor_context().tcp_host:
        return address
    raise ConfigError(
        "an engine on several nodes needs a job that listens on an address: start torchrun with "
        "--nnodes"
    )


def job_folder() -> Path | None:
    """The folder for a library's sockets; None outside an actor's process."""
    try:
        return actor_context().job_folder
    except RuntimeError:
        return None


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def network_variables(address: str) -> dict[str, str]:
    """Variables that make torch's collectives use the interface whose first address this is."""
    for _, name in socket.if_nameindex():
        if _address_of(name) == address:
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def _address_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(answer[20:24])
