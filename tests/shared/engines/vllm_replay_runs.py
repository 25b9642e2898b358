"""Runs `vllm_replay_worker` for small models: dense, with experts, and with experts as transformers
fuses them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm_replay_worker
from model_factory import BASE, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

_TIMEOUT_S = 600.0


def make_moe() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = BASE | {
        "hidden_size": 128,  # as vLLM's kernel for CPUs takes them
        "head_dim": 32,
    }
    config = Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config)


def parameters_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """As a trainer publishes them: transformers fuses experts."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def checkpoint_of(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """As a checkpoint has them: one tensor for each expert."""
    model.save_pretrained(folder / "saved")
    return load_file(folder / "saved" / "model.safetensors")


def prepare(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Two versions of the weights, and what a worker needs to make the model."""
    model.config.save_pretrained(folder)
    architecture = json.loads((folder / "config.json").read_text())
    architecture["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(architecture))
    save_file(dict(weights), folder / "version-1.safetensors")
    changed = {name: torch.randn_like(tensor) for name, tensor in weights.items()}
    save_file(changed, folder / "version-2.safetensors")
    is_tied = model.config.tie_word_embeddings and "lm_head.weight" not in weights
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {}
    (folder / "aliases.json").write_text(json.dumps(aliases))


def run_workers(store: Path, num_workers: int, folders: list[Path]) -> list[list[dict[str, Any]]]:
    """The reports of each worker."""
    script = vllm_replay_worker.__file__
    return run_scripts(
        [[script, str(rank), str(num_workers), store, *folders] for rank in range(num_workers)]
    )


def run_scripts(commands: Sequence[Sequence[str | Path]]) -> list[list[dict[str, Any]]]:
    """What each of these scripts, which run side by side, prints as JSON."""
    variables = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, *command],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        done = [worker.communicate(timeout=_TIMEOUT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, (_, errors) in zip(workers, done, strict=True):
        assert worker.returncode == 0, errors[-3000:]
    return [
        [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        for output, _ in done
    ]


def check_plans(folder: Path, num_workers: int) -> None:
    """Asserts that every parameter gets, by copies alone, the bytes that vLLM's loader gives it,
    and that a plan recorded after a layerwise reload is the same."""
    dense, experts = make_model("qwen3-wide"), make_moe()
    weights = {
        "dense": (dense, parameters_of(dense)),
        "experts": (experts, checkpoint_of(experts, folder)),
        "fused": (experts, parameters_of(experts)),
    }
    for name, (model, tensors) in weights.items():
        (folder / name).mkdir()
        prepare(folder / name, model, tensors)

    reports = run_workers(folder / "store", num_workers, [folder / name for name in weights])

    assert len(reports) == num_workers
    for per_worker in reports:
        assert len(per_worker) == len(weights)
        for report in per_worker:
            print(report)
            assert report["differing"] == []
            assert report["reasons"] == []
            assert report["num_copies"] >= report["num_parameters"]
            assert report["reasons_later"] == []
            assert report["num_copies_later"] == report["num_copies"]
            assert report["whole"] == []
            assert report["unread"] == []
