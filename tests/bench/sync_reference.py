"""A rank that measures what a case of the weights benchmark is compared with: `torchrun ...
sync_reference.py CASE FOLDER`. It begins at the end of its standard input.

FOLDER/reference.json gets the slowest rank's `verl_s`, of verl's protocol between the ranks and an
engine on their GPUs, and `copy_s`, of one copy of a rank's share of the engine's bytes. Where the
engine is elsewhere, verl's protocol has no counterpart, and the copy is from one GPU to the other.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import torch
from bench_progress import progress
from qwen3_shapes import SHAPES, parameter_shapes
from sync_case import SyncCase
from verl_protocol import DEFAULT_BUCKET_MIB, ReceiverProcess, measure, timed_copy

from umbra.runtime.cluster.environment import TorchrunEnvironment, bind_to_agent
from umbra.trainer.world import World, max_over_ranks

_TIMEOUT_S: Final = 300.0
_NUM_COPIES: Final = 4
_CPU_BUCKET_MIB: Final = 16


def main() -> None:
    bind_to_agent()  # as a session does: torchrun may be killed
    case, folder = SyncCase.from_json(sys.argv[1]), Path(sys.argv[2])
    receiver = ReceiverProcess() if case.mode == "hybrid" else None
    sys.stdin.read()  # until now nothing here has used a GPU
    with World.join(TorchrunEnvironment.read(), case.device, _TIMEOUT_S) as world:
        if world.is_lead:
            progress("ranks of the comparison have met")
        if receiver is not None:
            mesh = world.mesh if world.world_size > 1 else None
            bucket_mib = DEFAULT_BUCKET_MIB if case.device == "cuda" else _CPU_BUCKET_MIB
            measured = measure(case.shape, bucket_mib, str(world.device), mesh, receiver)
            found = {"verl_s": measured["verl_s"], "copy_s": measured["copy_s"]}
        else:
            found = {"copy_s": _copy_to_engine(case, world)}
        slowest = {
            name: float(max_over_ranks(torch.tensor(seconds, dtype=torch.float64)))
            for name, seconds in found.items()
        }
    if world.is_lead:
        (folder / "reference.json").write_text(json.dumps(slowest))
        progress(f"compared: {slowest}")


def _copy_to_engine(case: SyncCase, world: World) -> float:
    """The fastest of some copies from this rank's GPU to that of a standalone engine."""
    shapes = parameter_shapes(SHAPES[case.shape]).values()
    nbytes = 2 * sum(torch.Size(shape).numel() for shape in shapes) // world.world_size
    target = "cpu" if case.device == "cpu" else f"cuda:{case.num_ranks}"
    return min(timed_copy(nbytes, str(world.device), target) for _ in range(_NUM_COPIES))


if __name__ == "__main__":
    main()
