"""The calls of NCCL that links need, by ctypes. Torch-free.

`ProcessGroupNCCL` cannot be used. Its watchdog sees when a peer of any group has failed, and then
ends the process, unless variables are set that hold for all groups of the process. Here a failed
peer is an error of one communicator, which its owner aborts.

Communicators are non-blocking: no call waits for a peer, and the owner asks for the state.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

from umbra.runtime.errors import WeightSyncError

_SUCCESS: Final = 0
_IN_PROGRESS: Final = 7
_UINT8: Final = 1
_ID_NBYTES: Final = 128
_NUM_MEMBERS: Final = 2
_MAX_CTAS: Final = 4
# Blocks of the GPU that one communicator uses at a time. More would let the links of a rank to many
# nodes fill the GPU and wait for each other; fewer are slower on fast networks.
_CONFIG_MAGIC: Final = 0xCAFEBEEF
_CONFIG_VERSION: Final = 21800
# NCCL reads as many fields as this version had, and takes defaults for later ones.
_UNDEFINED: Final = -(1 << 31)


class _UniqueId(ctypes.Structure):
    """ncclUniqueId; it is passed by value."""

    _fields_ = (("data", ctypes.c_uint8 * _ID_NBYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


class NcclLibrary:
    """libnccl. Calls work on the GPU that is current in the thread.

    Raises (everywhere):
        WeightSyncError: NCCL refuses, or a peer has failed; the message names the call and the
            reason.
    """

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        lib.ncclGetErrorString.restype = ctypes.c_char_p
        lib.ncclGetLastError.restype = ctypes.c_char_p
        lib.ncclGetLastError.argtypes = (ctypes.c_void_p,)
        lib.ncclCommInitRankConfig.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            _UniqueId,
            ctypes.c_int,
            ctypes.POINTER(_Config),
        )
        transfer = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
            *(ctypes.c_void_p, ctypes.c_void_p),
        )
        lib.ncclSend.argtypes = lib.ncclRecv.argtypes = transfer
        lib.ncclCommGetAsyncError.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        for call in (lib.ncclCommFinalize, lib.ncclCommDestroy, lib.ncclCommAbort):
            call.argtypes = (ctypes.c_void_p,)

    def unique_id(self) -> bytes:
        """The address at which the members of a new communicator meet, in this process."""
        unique_id = _UniqueId()
        self._check("ncclGetUniqueId", self._lib.ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id)

    def make_comm(self, unique_id: bytes, member: int) -> ctypes.c_void_p:
        """Begins to make a communicator of two; it is made when `is_settled`. The caller keeps what
        is returned until then, because a thread of NCCL writes to it."""
        comm = ctypes.c_void_p()
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_CONFIG_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_MAX_CTAS,
            net_name=None,
            split_share=_UNDEFINED,
        )
        status = self._lib.ncclCommInitRankConfig(
            ctypes.byref(comm),
            *(_NUM_MEMBERS, _UniqueId.from_buffer_copy(unique_id), member, ctypes.byref(config)),
        )
        self._check("ncclCommInitRankConfig", status)
        if not comm.value:
            raise WeightSyncError("ncclCommInitRankConfig made no communicator")
        return comm

    def send(
        self, comm: ctypes.c_void_p, address: int, nbytes: int, member: int, stream: int
    ) -> None:
        status = self._lib.ncclSend(address, nbytes, _UINT8, member, comm, stream)
        self._check("ncclSend", status, comm)

    def receive(
        self, comm: ctypes.c_void_p, address: int, nbytes: int, member: int, stream: int
    ) -> None:
        status = self._lib.ncclRecv(address, nbytes, _UINT8, member, comm, stream)
        self._check("ncclRecv", status, comm)

    def is_settled(self, comm: ctypes.c_void_p) -> bool:
        """Whether the last call on `comm` has done its part on the host. What it put on a stream
        may still be running. Raises if any call has failed."""
        state = ctypes.c_int()
        status = self._lib.ncclCommGetAsyncError(comm, ctypes.byref(state))
        self._check("ncclCommGetAsyncError", status, comm)
        self._check("NCCL", state.value, comm)
        return state.value == _SUCCESS

    def finalize(self, comm: ctypes.c_void_p) -> None:
        """Begins to flush what was sent; it is flushed when `is_settled`."""
        self._check("ncclCommFinalize", self._lib.ncclCommFinalize(comm), comm)

    def destroy(self, comm: ctypes.c_void_p) -> None:
        """Frees a communicator that is finalized."""
        self._lib.ncclCommDestroy(comm)

    def abort(self, comm: ctypes.c_void_p) -> None:
        """Ends whatever runs on the communicator, and frees it."""
        self._lib.ncclCommAbort(comm)

    def _check(self, call: str, status: int, comm: ctypes.c_void_p | None = None) -> None:
        if status in (_SUCCESS, _IN_PROGRESS):
            return
        reason = self._lib.ncclGetErrorString(status).decode()
        details = (self._lib.ncclGetLastError(comm) or b"").decode(errors="replace").strip()
        raise WeightSyncError(f"{call} failed: {reason}" + (f": {details}" if details else ""))


@cache
def nccl_library() -> NcclLibrary | None:
    """The library that torch has loaded. None if this torch has none, as on machines without
    GPUs."""
    try:
        return NcclLibrary(ctypes.CDLL("libnccl.so.2"))
    except OSError:
        return None
