"""What a rank does before it can train, without umbra: run by torchrun, see node_start.py.

    bare_rank.py MODEL_FOLDER DONE_FILE

Imports what a rank of umbra imports, loads the model, and does one all-reduce with all others. Then
rank 0 makes the file.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model_path: str, done: str) -> None:
    dist.init_process_group("gloo")
    AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        Path(done).touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
