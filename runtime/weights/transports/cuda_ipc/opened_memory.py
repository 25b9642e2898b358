from __future__ import annotations

from collections.abc import Callable, Sequence

from umbra.runtime.weights.manifest import Manifest
from umbra.runtime.weights.transports.cuda_ipc.exported_image import ExportedImage
from umbra.runtime.weights.transports.cuda_ipc.ipc_memory import CudaOpener, Opener

MakeOpener = Callable[[], Opener]


class OpenedMemory:
    """The ranks' memory as one engine process has it open, over syncs. Owns it. One
    thread at a time.

        image ─▶ reads, copies ─▶ leave        once for each version
        close                                  ranks may have ended, or weights come another way

    Memory that the ranks export again in the next sync stays open. All other memory is closed at
    the beginning of that sync, before anything new is opened.
    """

    def __init__(self, make_opener: MakeOpener = CudaOpener) -> None:
        self._opener = make_opener()
        self._described: tuple[bytes, Sequence[object]] | None = None
        self._image: ExportedImage | None = None

    def image(self, manifest: bytes, exports: Sequence[object]) -> ExportedImage:
        """The ranks' exports of a sync; both arguments are in their wire form. The same object
        as before if the same tensors are in the same memory: then everything read from it is
        still in place."""
        described = manifest, exports
        if self._image is None or described != self._described:
            self._image = None
            image = ExportedImage(Manifest.from_wire(manifest), exports, self._opener)
            self._opener.keep(image.allocations)
            self._described, self._image = described, image
        return self._image

    def leave(self) -> None:
        """Ends a sync: waits for copies, and closes memory that does not stay. Idempotent."""
        self._opener.settle()
        if self._image is not None and not self._image.keeps_memory:
            self.close()

    def close(self) -> None:
        self._image = None
        self._opener.close()
