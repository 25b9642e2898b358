"""A training step alone (forward, backward, clip, AdamW), in tokens/s and model FLOPs utilisation.

One rank, packed sequences, parameters in float32 and computation in bfloat16, a Qwen3 model from a
seed. The floating-point operations are those of Narayanan et al. 2021 (arXiv:2104.04473) without
recomputation: 6 for each weight of a matrix and token, and 12 * layers * heads * head_dim for each
pair of a query and a key that it sees; the head's only for tokens that are scored.

    python tests/bench/training_speed.py [--shape 0.6B] [--rounds 5] [--compile] [--profile]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from qwen3_shapes import SHAPES
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3Config

from umbra.trainer.algorithms.algorithm_loading import load_loss
from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.micro_batches import MicroBatchBuilder, RankBatch
from umbra.trainer.model.optimizer import PolicyOptimizer
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.policy import Policy
from umbra.trainer.step import TrainStep

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0}  # dense bfloat16, from the data sheets
GROUP_SIZE = 8
PROMPT_LEN = 256


def make_batch(num_groups: int, max_new_tokens: int, micro_batch_tokens: int, vocab: int) -> Any:
    """Completions of a quarter of `max_new_tokens` to all of it; micro-batches of whole samples."""
    rng = np.random.default_rng(0)
    num_samples = num_groups * GROUP_SIZE
    news = rng.integers(max_new_tokens // 4, max_new_tokens + 1, num_samples)
    tokens: list[Any] = []
    for group in range(num_groups):
        prompt = rng.integers(1, vocab, PROMPT_LEN)
        for new in news[group * GROUP_SIZE : (group + 1) * GROUP_SIZE]:
            tokens.append(np.concatenate([prompt, rng.integers(1, vocab, new)]))
    lens = np.array([len(t) for t in tokens])
    micro_batches: list[list[int]] = [[]]
    load = 0
    for idx, length in enumerate(lens):
        if load + length > micro_batch_tokens and micro_batches[-1]:
            micro_batches.append([])
            load = 0
        micro_batches[-1].append(idx)
        load += int(length)
    mask = np.concatenate([np.r_[np.zeros(PROMPT_LEN), np.ones(new)] for new in news])
    return RankBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        offsets=np.r_[0, np.cumsum(lens)].astype(np.int32),
        prompt_lens=np.full(num_samples, PROMPT_LEN, np.int32),
        mask=mask.astype(np.uint8),
        logprobs=np.full(int(lens.sum()), -np.log(vocab), np.float32),
        versions=np.ones(int(lens.sum()), np.int64),
        advantages=rng.standard_normal(num_samples).astype(np.float32),
        sample_ids=[str(idx) for idx in range(num_samples)],
        micro_batches=micro_batches,
        num_tokens_global=int(news.sum()),
        num_samples_global=num_samples,
        metrics={},
    )


def step_flops(shape: dict[str, Any], batch: RankBatch) -> tuple[int, float]:
    """Rows that the model computes (a group's prompt once in each micro-batch), and FLOPs."""
    layers, heads, dim = (
        shape[key] for key in ("num_hidden_layers", "num_attention_heads", "head_dim")
    )
    width = shape["hidden_size"]
    attention = width * dim * (2 * heads + 2 * shape["num_key_value_heads"])
    block = attention + 3 * width * shape["intermediate_size"]
    rows = pairs = 0
    for members in batch.micro_batches:
        groups = {idx // GROUP_SIZE for idx in members}
        rows += len(groups) * PROMPT_LEN
        pairs += len(groups) * PROMPT_LEN * (PROMPT_LEN + 1) // 2
        for idx in members:
            new = int(batch.offsets[idx + 1] - batch.offsets[idx]) - PROMPT_LEN - 1
            rows += new
            pairs += new * PROMPT_LEN + new * (new + 1) // 2
    head = 6.0 * width * shape["vocab_size"] * batch.num_tokens_global
    return rows, 6.0 * layers * block * rows + head + 12.0 * layers * heads * dim * pairs


def make_step(shape: dict[str, Any], device: torch.device, options: argparse.Namespace) -> Any:
    register_packed_attention()
    config = Qwen3Config(**shape, tie_word_embeddings=shape["hidden_size"] < 4096)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        )
    model.config.use_cache = False
    policy = Policy(
        model.eval(),
        init_device_mesh(device.type, (1,)),
        is_packed=True,
        compute_dtype=torch.bfloat16,
        recomputes=options.recompute,
        compiles=options.compile,
    )
    train = TrainSection(steps=1000, learning_rate=1e-6, log_entropy=False)
    builder = MicroBatchBuilder(
        packed=True,
        dtype=torch.bfloat16,
        device=device,
        aggregation="token",
        max_new_tokens=options.max_new_tokens,
    )
    optimizer = PolicyOptimizer(policy.parameters, train)
    return TrainStep(policy, optimizer, builder, train, load_loss(train.loss))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)
    shape = SHAPES[options.shape]
    step = make_step(shape, device, options)
    batch = make_batch(
        options.groups, options.max_new_tokens, options.micro_batch_tokens, shape["vocab_size"]
    )
    rows, flops = step_flops(shape, batch)
    for idx in range(2):
        step.run(batch, idx)
    times: list[float] = []
    for idx in range(options.rounds):
        started = time.perf_counter()
        step.run(batch, idx + 2)
        _wait(device)
        times.append(time.perf_counter() - started)
    if options.profile:
        _profile(step, batch)
    seconds = statistics.median(times)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    peak = next((tflops for key, tflops in PEAK_TFLOPS.items() if key in name), None)
    print(
        json.dumps(
            {
                "device": name,
                "torch": torch.__version__,
                "shape": options.shape,
                "micro_batches": len(batch.micro_batches),
                "rows": rows,
                "step_s": round(seconds, 4),
                "rows_per_s": round(rows / seconds),
                "tflops": round(flops / seconds / 1e12, 1),
                "mfu": round(flops / seconds / 1e12 / peak, 3) if peak else None,
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if peak else None,
            }
        )
    )
    dist.destroy_process_group()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _profile(step: TrainStep, batch: RankBatch) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step.run(batch, 99)
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=32))


if __name__ == "__main__":
    main()
