from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

from umbra.runtime.errors import WeightSyncError
from umbra.runtime.weights.rank_exports import HANDLE_NBYTES, UUID_NBYTES

_BUFFER_ID: Final = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_ENABLE_PEER_ACCESS: Final = 1
# Memory of another GPU is mapped for the current context's GPU, if that reaches it directly.
_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ: Final = 1  # CU_MEM_ACCESS_FLAGS_PROT_READ


class _Handle(ctypes.Structure):
    """CUipcMemHandle; it is passed by value."""

    _fields_ = (("data", ctypes.c_char * HANDLE_NBYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AccessDesc(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The calls of CUDA's driver (libcuda) that exporting memory needs, by ctypes. Torch-free.

    torch's own method (`UntypedStorage._share_cuda_`) wraps the storage again at every call and
    counts its readers in files of /dev/shm. Here the sync itself determines when every engine has
    read. Calls work on the thread's current context (see `ipc_memory`). All raise WeightSyncError
    that names the call and the reason.
    """

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise WeightSyncError(f"there is no CUDA driver: {error}") from error
        self._lib.cuIpcOpenMemHandle_v2.argtypes = (
            ctypes.POINTER(ctypes.c_uint64),
            _Handle,
            ctypes.c_uint,
        )
        self._call("cuInit", 0)

    def device_uuids(self) -> list[bytes]:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._device_uuid(idx) for idx in range(count.value)]

    def has_context(self) -> bool:
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value is not None

    def address_range(self, pointer: int) -> tuple[int, int]:
        """First address and bytes of the allocation, or the chunk, that contains `pointer`."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            *(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(pointer)),
        )
        return base.value, nbytes.value

    def buffer_id(self, pointer: int) -> int:
        """The number of the allocation that contains `pointer`. A process never uses one again."""
        number = ctypes.c_uint64()
        self._call(
            "cuPointerGetAttribute",
            *(ctypes.byref(number), ctypes.c_int(_BUFFER_ID), ctypes.c_uint64(pointer)),
        )
        return number.value

    def export(self, base: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation; returns its address here. Each must be closed."""
        pointer = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return pointer.value

    def close(self, pointer: int) -> None:
        """Unmaps an opened allocation, which nothing may be reading."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    # Chunks are physical memory that is mapped to addresses, as torch's expandable segments are.

    def is_chunk(self, pointer: int) -> bool:
        """Whether the memory at `pointer` is a chunk, not an allocation that has a handle."""
        handle = ctypes.c_uint64()
        status = self._status(
            "cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(pointer)
        )
        if status != 0:  # what this may be is for `export` to find out
            return False
        self._call("cuMemRelease", handle)
        return True

    def export_chunk(self, pointer: int) -> int:
        """A descriptor of the chunk, which keeps its memory even after the
        exporter has freed it."""
        handle, fd = ctypes.c_uint64(), ctypes.c_int(-1)
        self._call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        try:
            self._call(
                "cuMemExportToShareableHandle",
                *(ctypes.byref(fd), handle, ctypes.c_int(_POSIX_FD), ctypes.c_uint64(0)),
            )
        finally:
            self._call("cuMemRelease", handle)
        return fd.value

    def reserve(self, nbytes: int) -> int:
        """Reserves addresses without memory; returns the first."""
        first, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call(
            "cuMemAddressReserve",
            *(ctypes.byref(first), ctypes.c_size_t(nbytes), ctypes.c_size_t(0), zero, zero),
        )
        return first.value

    def free_addresses(self, first: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(first), ctypes.c_size_t(nbytes))

    def map_chunk(self, address: int, nbytes: int, fd: int) -> None:
        """Maps another process's chunk to reserved addresses. The mapping keeps the memory."""
        handle = ctypes.c_uint64()
        self._call(
            "cuMemImportFromShareableHandle",
            *(ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(_POSIX_FD)),
        )
        try:
            start, flags = ctypes.c_size_t(0), ctypes.c_uint64(0)
            self._call(
                "cuMemMap",
                *(ctypes.c_uint64(address), ctypes.c_size_t(nbytes), start, handle, flags),
            )
        finally:
            self._call("cuMemRelease", handle)

    def allow_reading(self, address: int, nbytes: int, device: int) -> None:
        """Lets GPU `device`, an index of this process, read mapped chunks, even another GPU's."""
        access = _AccessDesc(_Location(_ON_DEVICE, device), _READ)
        self._call(
            "cuMemSetAccess",
            *(ctypes.c_uint64(address), ctypes.c_size_t(nbytes)),
            *(ctypes.byref(access), ctypes.c_size_t(1)),
        )

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps whole chunks, which nothing may be reading."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def _device_uuid(self, idx: int) -> bytes:
        device, uuid = ctypes.c_int(), ctypes.create_string_buffer(UUID_NBYTES)
        self._call("cuDeviceGet", ctypes.byref(device), idx)
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return uuid.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = self._status(name, *arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(status, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise WeightSyncError(f"{name} failed: {reason} ({status})")

    def _status(self, name: str, *arguments: object) -> int:
        status: int = getattr(self._lib, name)(*arguments)
        return status


@cache
def cuda_driver() -> CudaDriver:
    return CudaDriver()
