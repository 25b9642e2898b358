"""How fast verl's protocol brings weights to an engine on the same GPU.

It was written again from BucketedWeightSender and BucketedWeightReceiver of verl at 1dda039 (August
2026). In each sync, the sender allocates a bucket on the GPU and passes its CUDA IPC handle. It
copies tensor after tensor into the bucket. When one does not fit any more, it sends the names,
shapes, dtypes and offsets, and waits until the receiver has loaded them. In the end both drop the
bucket, collect garbage, and return the cached memory. The receiver fuses q, k, v and gate, up, as
vLLM does for a Qwen3. Messages are pickled, as verl's are, but go through a Unix socket; one of
them replaces verl's call through Ray and vLLM that starts the receiver.

`verl_s` is the time from that call to its answer, `copy_s` of one copy of as many contiguous bytes.
A round has a new receiver; its first sync (`first_s`) does not count. Parameters are bfloat16. The
receiver compares all of them with the sender's after each sync, which is not counted. On the cpu,
which is for tests, the bucket is in shared memory.

    python tests/bench/verl_protocol.py [--shape 8B] [--bucket-mib 2048] [--rounds 5]
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import torch
import torch.multiprocessing as mp
from bench_report import BenchError, median_of, options_parser
from qwen3_shapes import SHAPES, parameter_shapes
from torch import Tensor

_BUCKETS_MIB: Final = {"cpu": 16, "cuda": 2048}
"""Default sizes of a bucket; that of GPUs is verl's own."""
_TIMEOUT_S: Final = 120.0
"""Limit of one answer of the receiver. Its start imports torch and allocates the parameters."""
_SYNCS_A_ROUND: Final = 4
_FUSED: Final = {
    ".q_proj.": ".qkv_proj.",
    ".k_proj.": ".qkv_proj.",
    ".v_proj.": ".qkv_proj.",
    ".gate_proj.": ".gate_up_proj.",
    ".up_proj.": ".gate_up_proj.",
}


class Part(NamedTuple):
    """One tensor of the bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int

    def view(self, bucket: Tensor) -> Tensor:
        nbytes = self.shape.numel() * self.dtype.itemsize
        return bucket[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="8B")
    parser.add_argument("--device", choices=list(_BUCKETS_MIB), default="cuda")
    parser.add_argument("--bucket-mib", type=float, help="default: 2048, on the cpu 16")
    given = parser.parse_args()
    bucket_nbytes = int((given.bucket_mib or _BUCKETS_MIB[given.device]) * 2**20)
    rows = [measure(given.shape, bucket_nbytes, given.device) for _ in range(given.rounds)]
    print(json.dumps(median_of(rows, digits=5)))
    return 0


def measure(shape_name: str, bucket_nbytes: int, device: str) -> dict[str, float]:
    """One round, with a new receiver: its first sync, then medians of syncs and copies in turn.

    Raises:
        BenchError: the receiver ended, did not answer, or has other weights than the sender.
    """
    tensors = make_tensors(shape_name, device)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    pipe, theirs = mp.get_context("spawn").Pipe()
    receiver = mp.get_context("spawn").Process(target=receive, args=(theirs,), daemon=True)
    receiver.start()
    theirs.close()
    copy_s: list[float] = []
    try:
        _ask(pipe, (shape_name, device))
        verl_s = [_timed_sync(pipe, tensors, bucket_nbytes, device)]
        for _ in range(_SYNCS_A_ROUND):
            copy_s.append(_timed_copy(nbytes, device))
            verl_s.append(_timed_sync(pipe, tensors, bucket_nbytes, device))
    finally:
        pipe.close()
        receiver.join(_TIMEOUT_S)
        receiver.kill()
    return {
        "nbytes": nbytes,
        "first_s": verl_s[0],
        "verl_s": statistics.median(verl_s[1:]),
        "copy_s": statistics.median(copy_s),
    }


def _timed_copy(nbytes: int, device: str) -> float:
    """Seconds of one copy of so many contiguous bytes. Their memory is free afterwards."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    _synchronize(device)
    begun_at = time.perf_counter()
    target.copy_(source)
    _synchronize(device)
    seconds = time.perf_counter() - begun_at
    del source, target
    _release(device)
    return seconds


def make_tensors(shape_name: str, device: str) -> dict[str, Tensor]:
    """A trainer's parameters, bfloat16. Each process of a device draws the same numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        for name, shape in parameter_shapes(SHAPES[shape_name]).items()
    }


def _timed_sync(
    pipe: Connection, tensors: Mapping[str, Tensor], bucket_nbytes: int, device: str
) -> float:
    _synchronize(device)
    begun_at = time.perf_counter()
    pipe.send("sync")
    _send(pipe, tensors, bucket_nbytes, device)
    _answer(pipe)
    seconds = time.perf_counter() - begun_at
    if differing := _ask(pipe, "compare"):
        raise BenchError(f"{len(differing)} tensors differ after a sync, {differing[0]} first")
    return seconds


def _send(pipe: Connection, tensors: Mapping[str, Tensor], bucket_nbytes: int, device: str) -> None:
    bucket = torch.empty(bucket_nbytes, dtype=torch.uint8, device=device)
    _ask(pipe, bucket)
    parts: list[Part] = []
    offset = 0
    for name, tensor in tensors.items():
        if parts and offset + tensor.nbytes > bucket_nbytes:
            _synchronize(device)
            _ask(pipe, (parts, False))
            parts, offset = [], 0
        parts.append(Part(name, tensor.shape, tensor.dtype, offset))
        parts[-1].view(bucket).copy_(tensor, non_blocking=True)
        offset += tensor.nbytes
    _synchronize(device)
    _ask(pipe, (parts, True))
    del bucket
    _release(device)


def _ask(pipe: Connection, message: object) -> Any:
    """The receiver's answer."""
    pipe.send(message)
    return _answer(pipe)


def _answer(pipe: Connection) -> Any:
    try:
        if pipe.poll(_TIMEOUT_S):
            return pipe.recv()
    except EOFError:
        raise BenchError("the receiver ended; its error is above") from None
    raise BenchError(f"the receiver did not answer within {_TIMEOUT_S:g} s")


def receive(pipe: Connection) -> None:
    """The receiver's process. Ends when the sender closes the pipe."""
    try:
        receiver = _Receiver(*pipe.recv())
        pipe.send("ready")
        while True:
            if pipe.recv() == "sync":
                receiver.sync(pipe)
                pipe.send("done")
            else:
                pipe.send(receiver.compare_and_clear())
    except EOFError:
        return


class _Receiver:
    """An engine's parameters and its loader, without the engine."""

    def __init__(self, shape_name: str, device: str) -> None:
        self._shape_name = shape_name
        self._device = device
        places: dict[str, tuple[str, int, int]] = {}  # parameter, first row and rows, by tensor
        sizes: dict[str, list[int]] = {}
        for name, shape in parameter_shapes(SHAPES[shape_name]).items():
            parameter = name
            for part, fused in _FUSED.items():
                parameter = parameter.replace(part, fused)
            size = sizes.setdefault(parameter, [0, *shape[1:]])
            places[name] = parameter, size[0], shape[0]
            size[0] += shape[0]
        made = {
            name: torch.zeros(size, dtype=torch.bfloat16, device=device)
            for name, size in sizes.items()
        }
        self._rows = {
            name: made[parameter].narrow(0, first, num_rows)
            for name, (parameter, first, num_rows) in places.items()
        }

    def sync(self, pipe: Connection) -> None:
        bucket: Tensor = pipe.recv()
        pipe.send(None)
        while not self._load(bucket, *pipe.recv()):
            pipe.send(None)
        pipe.send(None)
        del bucket
        _release(self._device)

    def _load(self, bucket: Tensor, parts: Sequence[Part], is_last: bool) -> bool:
        for part in parts:
            self._rows[part.name].copy_(part.view(bucket), non_blocking=True)
        _synchronize(self._device)
        return is_last

    def compare_and_clear(self) -> list[str]:
        """Names of the tensors that are not what the sender has."""
        expected = make_tensors(self._shape_name, self._device)
        differing = [name for name, rows in self._rows.items() if not rows.equal(expected[name])]
        for rows in self._rows.values():
            rows.zero_()
        del expected
        _release(self._device)
        return differing


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _release(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
