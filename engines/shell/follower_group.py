from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from umbra.engines.loading.image_weights import filled_image
from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.errors import ConfigError, DeadlineExceeded
from umbra.runtime.rpc.rpc_client import Handle

_START_LIMIT_S: Final = 120.0
# Time for a follower's process and its program to start. All parts of an engine are started at
# once; a follower that was killed is back after its restart delay.
_CALL_LIMIT_S: Final = 60.0
_IMAGE_LIMIT_S: Final = 600.0
# Memory as large as the model: a machine may take 2.5 s for each GB that it has never used.
_CHUNK_NBYTES: Final = 16 << 20
# The follower does nothing else while it copies a chunk, which takes milliseconds.
_SIOCGIFADDR: Final = 0x8915


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
