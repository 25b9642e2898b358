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
import json
import mmap
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from umbra.runtime.actor.actor_spec import actor_context
from umbra.runtime.errors import EngineError, WeightSyncError
from umbra.runtime.process.child_process import ChildProcess
from umbra.runtime.process.host_memory import create_memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_IMAGE: Final = "umbra-weights"


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
