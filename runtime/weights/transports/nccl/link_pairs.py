"""What carries the bytes of a link between its two members: their TCP connection, or NCCL between
two GPUs.

Both take tensors on any device. Calls block until the bytes are where they belong, or the time is
used up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.sync_calls import remaining_s
from umbra.runtime.weights.transports.nccl.link_connection import LinkConnection
from umbra.runtime.weights.transports.nccl.nccl_library import NcclLibrary, nccl_library

HOST: Final = torch.device("cpu")
_LOOK_INTERVAL_S: Final = 0.0002
# Time between two looks at a transfer. A bucket takes about a millisecond.
_FLUSH_LIMIT_S: Final = 5.0
# For the last message to leave, which takes milliseconds.


class LinkPair(Protocol):
    """One member's way to the other. The link owns their TCP connection."""

    def send(self, tensors: Sequence[Tensor]) -> None: ...
    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Receives into `tensors`, which are contiguous and on the host."""
        ...

    def flush(self) -> None:
        """Returns when the connection may be closed without losing what was sent."""
        ...

    def close(self) -> None:
        """The other member notices. Idempotent."""
        ...


class TcpPair:
    """Between any two processes, through the connection of the link."""

    def __init__(self, connection: LinkConnection) -> None:
        self._connection = connection

    def send(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._connection.send(_memory(tensor.cpu()))

    def receive(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._connection.receive(_memory(tensor))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class NcclPair:
    """Between two GPUs. It has a stream of its own. A kernel that waits for a lost peer runs until
    `close` aborts the communicator.

    Args:
        connection: carries the address at which the members meet.
        device: GPU of this member.
        limit_s: for the connection to be made.
        deadline: of the sync.
        check_open: called while this member waits; what it raises ends the wait.
    """

    def __init__(
        self,
        connection: LinkConnection,
        member: int,
        device: torch.device,
        limit_s: float,
        deadline: float,
        check_open: Callable[[], None],
    ) -> None:
        self._nccl = _required_library()
        self._peer = 1 - member
        self._device = device
        self._deadline = deadline
        self._check_open = check_open
        self._held: Sequence[Tensor] = ()  # a kernel may use them until it ends or is aborted
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._event = torch.cuda.Event()
            if member == 0:
                unique_id = self._nccl.unique_id()
                connection.send_frame(unique_id)
            else:
                unique_id = connection.receive_frame()
            self._comm = self._nccl.make_comm(unique_id, member)
            self._is_open = True
        try:
            self._wait(self._is_settled, min(deadline, time.monotonic() + limit_s))
        except BaseException:
            self.close()
            raise

    def send(self, tensors: Sequence[Tensor]) -> None:
        with torch.cuda.device(self._device):
            self._transfer(self._nccl.send, [tensor.to(self._device) for tensor in tensors])

    def receive(self, tensors: Sequence[Tensor]) -> None:
        with torch.cuda.device(self._device):
            staged = [torch.empty_like(tensor, device=self._device) for tensor in tensors]
            self._transfer(self._nccl.receive, staged)
            with torch.cuda.stream(self._stream):
                for tensor, data in zip(tensors, staged, strict=True):
                    tensor.copy_(data)

    def flush(self) -> None:
        limit = min(self._deadline, time.monotonic() + _FLUSH_LIMIT_S)
        with torch.cuda.device(self._device):
            self._nccl.finalize(self._comm)
            self._wait(self._is_settled, limit)
            self._is_open = False
            self._nccl.destroy(self._comm)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            with torch.cuda.device(self._device):
                self._nccl.abort(self._comm)
        self._held = ()

    def _transfer(self, call: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        stream, self._held = self._stream, tensors
        stream.wait_stream(torch.cuda.current_stream())  # it allocated them, and may still copy
        for tensor in tensors:
            call(self._comm, tensor.data_ptr(), tensor.nbytes, self._peer, stream.cuda_stream)
            self._wait(self._is_settled, self._deadline)
        self._event.record(stream)
        self._wait(self._is_transferred, self._deadline)

    def _is_settled(self) -> bool:
        return self._nccl.is_settled(self._comm)

    def _is_transferred(self) -> bool:
        return self._is_settled() and self._event.query()

    def _wait(self, is_done: Callable[[], bool], deadline: float) -> None:
        while not is_done():
            remaining_s(deadline)
            self._check_open()
            time.sleep(_LOOK_INTERVAL_S)  # NCCL has no event for this


def _required_library() -> NcclLibrary:
    library = nccl_library()
    if library is None:
        raise WeightSyncError("libnccl.so.2 is not loaded")
    return library


def link_device(tensors: Collection[Tensor]) -> torch.device:
    """The device of this end's links: the GPU that has all these tensors, or the host."""
    devices = {tensor.device for tensor in tensors}
    device = next(iter(devices), HOST)
    is_usable = len(devices) == 1 and device.type == "cuda" and nccl_library() is not None
    return device if is_usable else HOST


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    array: Any = tensor.numpy()  # whose types do not say that it is a buffer
    return memoryview(array).cast("B")


def device_key(device: torch.device) -> str:
    """The UUID of a GPU, or "" for the host."""
    if device.type != "cuda":
        return ""
    properties: Any = cast("Any", torch.cuda).get_device_properties(device)
    return str(properties.uuid)
