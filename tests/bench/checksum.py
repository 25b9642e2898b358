"""How fast the checksums of a model's weights are computed, beside a plain read of them.

Takes the parameters of a Qwen3 shape, random, in bfloat16, and in float32 as a rank has them that
casts them for the engines (`cast`). `seconds` is the time for the checksums of all of them, from
the call until they are on the host; `first_s` is that of the first call, which may compile the
kernel. `read_seconds` is that of torch.sum of the same bytes as int64. `gb_per_s` counts the bytes
that are read: four for each element that is cast.

    python tests/bench/checksum.py [--device cuda] [--shape 8B] [--rounds 5] [--json]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from bench_hardware import describe_hardware
from bench_options import options_parser
from qwen3_shapes import SHAPES, parameter_shapes
from result_table import print_result
from torch import Tensor

from umbra.runtime.weights.checksums.checksum import CastValues, checksums_of


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("no usable CUDA device; --device cpu measures on this CPU")
    torch.set_num_threads(1)  # a rank's share of its node, as a checksum takes it
    hardware = describe_hardware()
    if given.device == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name()
    result: dict[str, Any] = {
        "bench": "checksum",
        "hardware": hardware,
        "versions": {"torch": version("torch")},
        "rounds": given.rounds,
        "shape": given.shape,
    }
    for name, dtype in (("as they are", torch.bfloat16), ("cast", torch.float32)):
        tensors = make_tensors(given.shape, given.device, dtype)
        result[name] = measure(tensors, given.rounds)
        del tensors
    return print_result(result, as_json=given.json)


def make_tensors(shape_name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        for shape in parameter_shapes(SHAPES[shape_name]).values()
    ]


def measure(tensors: Sequence[Tensor], rounds: int) -> dict[str, Any]:
    nbytes = sum(tensor.nbytes for tensor in tensors)
    parts = [CastValues(tensor, torch.bfloat16) for tensor in tensors]
    flat = [tensor.view(-1).view(torch.int64) for tensor in tensors]
    device = tensors[0].device

    def read() -> None:
        torch.stack([data.sum() for data in flat]).cpu()

    first_s = timed(lambda: checksums_of(parts), device)
    timed(read, device)
    checksum_s: list[float] = []
    read_s: list[float] = []
    for _ in range(rounds):
        checksum_s.append(timed(lambda: checksums_of(parts), device))
        read_s.append(timed(read, device))
    seconds, read_seconds = statistics.median(checksum_s), statistics.median(read_s)
    return {
        "bytes": nbytes,
        "first_s": first_s,
        "seconds": seconds,
        "gb_per_s": nbytes / seconds / 1e9,
        "read_seconds": read_seconds,
        "read_gb_per_s": nbytes / read_seconds / 1e9,
    }


def timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun_at = time.perf_counter()
    work()
    return time.perf_counter() - begun_at


if __name__ == "__main__":
    sys.exit(main())
