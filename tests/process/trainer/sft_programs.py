"""SFT steps of the ranks of a world; imported by name in each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rank_programs import TRAIN, Arrays, full_parameters, make_world
from training_models import make_model

from umbra.runtime.rollout.manager.admission import PromptOrder
from umbra.runtime.rollout.rollout_config import BatchLayout
from umbra.trainer.data.sft_rows import SftRow
from umbra.trainer.model.micro_batches import MicroBatchBuilder
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.train_model import POLICY, PassSettings, PreparedModel, TrainModel
from umbra.trainer.sft.row_preparation import RowFiles
from umbra.trainer.sft.sft_run import CrossEntropy, SftBatches
from umbra.trainer.step import TrainStep
from umbra.trainer.world.mesh import Mesh

NUM_ROWS, BATCH_SIZE, SEED = 11, 6, 5


def random_rows() -> list[SftRow]:
    """Of 2 to 20 tokens; each of 0 to 2 answers is learned, and the last token."""
    generator = np.random.default_rng(0)
    found: list[SftRow] = []
    for _ in range(NUM_ROWS):
        tokens = generator.integers(2, 64, int(generator.integers(2, 21))).astype(np.int32)
        mask = np.repeat(generator.integers(0, 2, 7), 3)[: len(tokens)].astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        found.append(SftRow(tokens, mask))
    return found


def make_batches(rank: int, world_size: int, micro_batches: int) -> SftBatches:
    return SftBatches(
        rows=RowFiles.collect(random_rows()),
        batch_size=BATCH_SIZE,
        layout=BatchLayout(num_micro_batches=micro_batches),
        rank=rank,
        world_size=world_size,
    )


def train(world: Mesh, *, packed: bool, micro_batches: int) -> dict[str, Any]:
    model = make_model("qwen3")
    if packed:
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)
    passes = PassSettings(compute_dtype=torch.float32)
    models = {POLICY: TrainModel(PreparedModel(model, packed), world.fsdp, passes, TRAIN)}
    builder = MicroBatchBuilder(
        packed=packed,
        dtype=torch.float32,
        device=world.device,
        aggregation="token",
        max_new_tokens=1,
    )
    step = TrainStep(models, builder, TRAIN, CrossEntropy(), print)
    batches = make_batches(world.rank, world.world_size, micro_batches)
    order = PromptOrder(NUM_ROWS, SEED)
    metrics = [step.run(batches.in_order(order, idx), idx) for idx in range(3)]
    parameters: Arrays = full_parameters(models[POLICY])
    return {"metrics": metrics, "parameters": parameters}


def train_all(variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    world = make_world()
    return [train(world, **variant) for variant in variants]
