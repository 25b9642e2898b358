"""How fast verl's protocol brings weights to an engine on the same GPU, beside one device copy.

The protocol was written again from what BucketedWeightSender and BucketedWeightReceiver do in verl
at 1dda039 (August 2026). For each sync:

1. The sender allocates a bucket on the GPU and passes its CUDA IPC handle.
2. It copies tensor after tensor into the bucket. Before one that does not fit any more, it waits
   for these copies, sends names, shapes, dtypes and offsets, and waits for an acknowledgement.
   A tensor larger than the bucket goes by a CUDA IPC handle of its own.
3. The receiver loads the tensors from the bucket into its parameters, waits for these copies, and
   acknowledges.
4. In the end both drop the bucket, collect garbage, and return the cached GPU memory.

The sender is this process, the receiver another one. The loader does what vLLM's does for a Qwen3:
it copies q, k and v into rows of one parameter, and gate and up into another. Messages are pickled,
as verl's are, but go through a Unix socket of multiprocessing; verl has ZMQ. One such message also
replaces the call to the engine (in verl: through Ray and vLLM) that starts the receiver.

What is counted: `verl_s` is the time from that call to its answer, all four steps included.
`copy_s` is one copy of as many contiguous bytes within the sender. A round has a new receiver; its
first sync (`first_s`) does not count, then syncs and copies alternate. Parameters are bfloat16 on
both sides. The receiver compares all of them with the sender's after each sync, and clears them;
the time for that is not counted. On the cpu, which is for tests, the bucket is in shared memory.

Where the parameters are sharded over several ranks, each rank has a receiver on its own GPU, which
is one of the tensor-parallel workers of an engine. As verl does for FSDP, all ranks gather each
whole tensor before they copy it into their buckets, and each worker loads its slice of it
(`sync_reference.py`).

    python tests/bench/verl_protocol.py [--shapes 0.6B 8B] [--buckets-mib 512 2048] [--rounds 5]
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.multiprocessing as mp
from bench_hardware import describe_hardware
from bench_options import options_parser
from bench_programs import VERL_REVISION, BenchError
from qwen3_shapes import SHAPES, parameter_shapes
from result_table import print_result
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

DEFAULT_BUCKET_MIB: Final = 2048
"""verl's own default."""
_TIMEOUT_S: Final = 120.0
"""For one answer of the receiver. Its start imports torch and allocates the parameters."""
_SYNCS_A_ROUND: Final = 4
_SLICED_DIMS: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
"""Of which dim a tensor-parallel worker has a slice, by the layer."""
_FUSED: Final = {
    ".q_proj.": ".qkv_proj.",
    ".k_proj.": ".qkv_proj.",
    ".v_proj.": ".qkv_proj.",
    ".gate_proj.": ".gate_up_proj.",
    ".up_proj.": ".gate_up_proj.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor: at `offset` of the bucket, or `whole` by a handle of its own."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    whole: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A receiver's index among the `count` tensor-parallel workers of its engine."""

    idx: int = 0
    count: int = 1

    def slice_of(self, name: str, tensor: Tensor) -> Tensor:
        dim = _SLICED_DIMS.get(name.split(".")[-2])
        return tensor if dim is None else tensor.chunk(self.count, dim)[self.idx]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledBucket:
    parts: Sequence[Part]
    is_last: bool


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6B", "8B"])
    parser.add_argument(
        "--buckets-mib",
        nargs="+",
        type=float,
        default=[512, DEFAULT_BUCKET_MIB],
        help="sizes of the bucket (default 512 2048, which is verl's)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no usable CUDA device")
    cases = [(shape, mib) for shape in given.shapes for mib in given.buckets_mib]
    rows: dict[tuple[str, float], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(given.rounds):
        for shape, mib in cases:
            rows[shape, mib].append(measure(shape, mib, given.device))
    result: dict[str, Any] = {
        "bench": "verl_protocol",
        "hardware": describe_hardware() | _describe_gpu(given.device),
        "versions": {"torch": version("torch"), "verl": VERL_REVISION},
        "rounds": given.rounds,
    }
    result |= {f"{shape}, {mib:g} MiB": _summary(rows[shape, mib]) for shape, mib in cases}
    return print_result(result, as_json=given.json)


def _describe_gpu(device: str) -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}


def _summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians over the rounds, and the fastest and slowest round of verl's protocol."""
    syncs = [row["verl_s"] for row in rows]
    facts = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    facts |= {"verl_min_s": min(syncs), "verl_max_s": max(syncs)}
    rounded = {key: round(value, 5) for key, value in facts.items()}
    return rounded | {"nbytes": int(facts["nbytes"])}


class ReceiverProcess:
    """A receiver that is started. It imports what it needs, and uses no GPU before `begin`."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=receive, args=(theirs,))
        self._process.daemon = True
        self._process.start()
        theirs.close()

    def begin(self, shape_name: str, device: str, worker: Worker) -> None:
        """Returns when its parameters are there. It has the cores of the caller."""
        self.pipe.send((shape_name, device, worker, os.sched_getaffinity(0)))
        _answer(self.pipe)

    def end(self) -> None:
        self.pipe.close()
        self._process.join(_TIMEOUT_S)
        self._process.kill()


def measure(
    shape_name: str,
    bucket_mib: float,
    device: str,
    mesh: DeviceMesh | None = None,
    receiver: ReceiverProcess | None = None,
) -> dict[str, float]:
    """One round, with a new receiver: its first sync, then medians of syncs and copies in turn.

    Args:
        mesh: of the ranks over which the parameters are sharded, which all call it. None: this is
            the only one.
        receiver: one that was started before. It is ended here.

    Returns:
        `nbytes` of all parameters. The copy is of this rank's part of them.

    Raises:
        BenchError: the receiver ended, did not answer, or has other weights than the sender.
    """
    worker = Worker() if mesh is None else Worker(idx=mesh.get_rank(), count=mesh.size())
    tensors = make_tensors(shape_name, device)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if mesh is not None:
        tensors = {name: _sharded(tensor, mesh) for name, tensor in tensors.items()}
        _release(device)
    copy_s: list[float] = []
    receiver = receiver or ReceiverProcess()
    pipe = receiver.pipe
    try:
        receiver.begin(shape_name, device, worker)
        verl_s = [_timed_sync(pipe, tensors, int(bucket_mib * 2**20), device)]
        for _ in range(_SYNCS_A_ROUND):
            copy_s.append(timed_copy(nbytes // worker.count, device, device))
            verl_s.append(_timed_sync(pipe, tensors, int(bucket_mib * 2**20), device))
    finally:
        receiver.end()
    del tensors
    _release(device)
    return {
        "nbytes": nbytes,
        "first_s": verl_s[0],
        "verl_s": statistics.median(verl_s[1:]),
        "copy_s": statistics.median(copy_s),
    }


def timed_copy(nbytes: int, device: str, to_device: str) -> float:
    """Seconds of one copy of so many contiguous bytes. Their memory is free afterwards."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source, device=to_device)
    synchronize(device)
    synchronize(to_device)
    begun_at = time.perf_counter()
    target.copy_(source)
    synchronize(device)
    synchronize(to_device)
    seconds = time.perf_counter() - begun_at
    del source, target
    _release(device)
    return seconds


def make_tensors(shape_name: str, device: str) -> dict[str, Tensor]:
    """A trainer's parameters, bfloat16. Each process of a device draws the same numbers."""
    tensors: dict[str, Tensor] = {}
    for idx, (name, shape) in enumerate(parameter_shapes(SHAPES[shape_name]).items()):
        generator = torch.Generator(device).manual_seed(idx)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        tensors[name] = tensor.normal_(generator=generator)
    return tensors


def _sharded(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """The rank's rows alone, in memory of their own."""
    local = tensor.chunk(mesh.size())[mesh.get_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def _timed_sync(
    pipe: Connection, tensors: Mapping[str, Tensor], bucket_nbytes: int, device: str
) -> float:
    synchronize(device)
    begun_at = time.perf_counter()
    pipe.send("sync")
    _send(pipe, tensors, bucket_nbytes, device)
    _answer(pipe)
    seconds = time.perf_counter() - begun_at
    pipe.send("compare")
    if differing := _answer(pipe):
        raise BenchError(f"{len(differing)} tensors differ after a sync, {differing[0]} first")
    return seconds


def _send(pipe: Connection, tensors: Mapping[str, Tensor], bucket_nbytes: int, device: str) -> None:
    bucket = torch.empty(bucket_nbytes, dtype=torch.uint8, device=device)
    pipe.send(bucket)
    _answer(pipe)
    parts: list[Part] = []
    offset = 0
    for name, held in tensors.items():
        tensor = held.full_tensor() if isinstance(held, DTensor) else held
        if parts and offset + tensor.nbytes > bucket_nbytes:
            synchronize(device)
            _exchange(pipe, FilledBucket(parts=parts, is_last=False))
            parts, offset = [], 0
        if tensor.nbytes > bucket_nbytes:
            whole = Part(name=name, shape=tensor.shape, dtype=tensor.dtype, offset=0, whole=tensor)
            _exchange(pipe, FilledBucket(parts=[whole], is_last=False))
            continue
        parts.append(Part(name=name, shape=tensor.shape, dtype=tensor.dtype, offset=offset))
        _view(bucket, parts[-1]).copy_(tensor, non_blocking=True)
        offset += tensor.nbytes
    synchronize(device)
    _exchange(pipe, FilledBucket(parts=parts, is_last=True))
    del bucket
    _release(device)


def _exchange(pipe: Connection, filled: FilledBucket) -> None:
    pipe.send(filled)
    _answer(pipe)


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
        shape_name, device, worker, cores = pipe.recv()
        os.sched_setaffinity(0, cores)
        if ":" in device:  # one of several
            torch.cuda.set_device(device)
        receiver = _Receiver(shape_name, device, worker)
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

    def __init__(self, shape_name: str, device: str, worker: Worker) -> None:
        self._shape_name = shape_name
        self._device = device
        self._worker = worker
        self._places: dict[str, tuple[str, int]] = {}  # parameter and its first row, by tensor
        shapes: dict[str, list[int]] = {}
        for name, whole in parameter_shapes(SHAPES[shape_name]).items():
            shape = worker.slice_of(name, torch.empty(whole, device="meta")).shape
            parameter = name
            for part, fused in _FUSED.items():
                parameter = parameter.replace(part, fused)
            rows = shapes.setdefault(parameter, [0, *shape[1:]])
            self._places[name] = parameter, rows[0]
            rows[0] += shape[0]
        self._parameters = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=device)
            for name, shape in shapes.items()
        }

    def sync(self, pipe: Connection) -> None:
        bucket: Tensor = pipe.recv()
        pipe.send(None)
        while not self._load(bucket, pipe.recv()):
            pipe.send(None)
        pipe.send(None)
        del bucket
        _release(self._device)

    def _load(self, bucket: Tensor, filled: FilledBucket) -> bool:
        """Whether it was the last one."""
        for part in filled.parts:
            tensor = _view(bucket, part) if part.whole is None else part.whole
            tensor = self._worker.slice_of(part.name, tensor)
            self._rows(part.name, len(tensor)).copy_(tensor, non_blocking=True)
        synchronize(self._device)
        return filled.is_last

    def compare_and_clear(self) -> list[str]:
        """Names of the tensors that are not what the sender has."""
        whole = make_tensors(self._shape_name, self._device)
        expected = {name: self._worker.slice_of(name, tensor) for name, tensor in whole.items()}
        differing = [
            name
            for name, tensor in expected.items()
            if not torch.equal(self._rows(name, len(tensor)), tensor)
        ]
        for parameter in self._parameters.values():
            parameter.zero_()
        del whole, expected
        _release(self._device)
        return differing

    def _rows(self, name: str, num_rows: int) -> Tensor:
        parameter, first = self._places[name]
        return self._parameters[parameter].narrow(0, first, num_rows)


def _view(bucket: Tensor, part: Part) -> Tensor:
    nbytes = part.shape.numel() * part.dtype.itemsize
    return bucket[part.offset : part.offset + nbytes].view(part.dtype).view(part.shape)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def _release(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
