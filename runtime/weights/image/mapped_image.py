from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.process.host_memory import map_memory, populate_mapping, refusal, unmap
from umbra.runtime.weights.image.fd_server import received_fd
from umbra.runtime.weights.manifest import PIECE_NBYTES

if TYPE_CHECKING:
    from umbra.runtime.weights.image.gpu_copies import PageLocks


class MappedImage:
    """The image of a node's weights in this process. Torch-free. Owns the mapping, which is shared
    and writable, but not `fd`. Views keep `memory` mapped: drop them before `close`."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.memory = map_memory(fd, nbytes)
        self._is_present = bytearray(-(-nbytes // PIECE_NBYTES))
        self._locks: PageLocks | None = None
        self._turn = threading.Lock()  # links fill the image that their engine reads

    def make_present(self, window: slice, *, for_gpu: bool = False) -> None:
        """Allocates and maps the pages of these bytes: faults take several times as long.
        From any thread.

        With `for_gpu`, the pages are also locked. A copy to or from a GPU must not cross the edge
        of a piece of PIECE_NBYTES, because each is locked by itself. Raises WeightSyncError if
        there is no memory.
        """
        pieces = range(window.start // PIECE_NBYTES, -(-window.stop // PIECE_NBYTES))
        with self._turn:
            for piece in pieces:
                start = piece * PIECE_NBYTES
                nbytes = min(PIECE_NBYTES, len(self.memory) - start)
                if not self._is_present[piece]:
                    self._populate(start, nbytes)
                    self._is_present[piece] = True
                if for_gpu:
                    self._lock(start, nbytes)

    def _populate(self, start: int, nbytes: int) -> None:
        try:
            populate_mapping(self.memory, start, nbytes)
        except OSError as error:
            raise WeightSyncError(
                f"no shared memory for an image of {len(self.memory)} bytes, as many as the "
                f"weights have: {refusal(error)}"
            ) from error

    def _lock(self, start: int, nbytes: int) -> None:
        if self._locks is None:
            # Imports torch, which some engines otherwise do without.
            from umbra.runtime.weights.image.gpu_copies import PageLocks

            self._locks = PageLocks(self.memory)
        self._locks.lock(start, nbytes)

    def close(self) -> None:
        """Idempotent."""
        if self._locks is not None:
            self._locks.close()
        unmap(self.memory)


class KeptImage:
    """The image of the last sync, mapped until its owner offers another one. One
    thread at a time."""

    def __init__(self) -> None:
        self._name = ""
        self._image: MappedImage | None = None

    def receive(self, wire: Mapping[str, Any], timeout_s: float) -> MappedImage:
        """The image that the supervisor offers, owned by this object. Names are never reused."""
        name, nbytes = wire["image"]["name"], wire["image"]["nbytes"]
        if self._image is None or name != self._name:
            self.close()
            with received_fd(wire["fd_socket"], name, timeout_s) as fd:
                self._image, self._name = MappedImage(fd, nbytes), name
        return self._image

    def close(self) -> None:
        image, self._image = self._image, None
        if image is not None:
            image.close()
