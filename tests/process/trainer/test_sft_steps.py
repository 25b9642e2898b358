"""SFT steps: real ranks, gloo, FSDP2, against a plain float64 loop."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import start_fork
from sft_programs import BATCH_SIZE, NUM_ROWS, SEED, make_batches, random_rows, train_all
from torch import Tensor
from training_models import make_model

from umbra.runtime.rollout.manager.admission import PromptOrder
from umbra.runtime.testing.distributed_world import DistributedWorld

pytestmark = [pytest.mark.process]

VARIANTS = [
    {"packed": packed, "micro_batches": micro_batches}
    for packed in (True, False)
    for micro_batches in (1, 3)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> list[dict[str, Any]]:
    """What rank 0 has after three steps, of one rank and of two, each with all `VARIANTS`."""
    found: list[dict[str, Any]] = []
    for num_ranks in (1, 2):
        world = DistributedWorld(tmp_path_factory.mktemp("world"), start_fork)
        found += world(train_all, VARIANTS, num_ranks=num_ranks, timeout_s=120.0)[0]
    return found


def plain_gradient(members: list[int]) -> tuple[float, float]:
    """The mean of -logprob over all learned tokens of these rows, and the norm of its gradient."""
    model: Any = make_model("qwen3").double()
    rows = random_rows()
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for row in members:
        tokens = torch.as_tensor(rows[row].tokens, dtype=torch.int64)
        logits: Tensor = model(input_ids=tokens[None]).logits[0]
        logprobs = logits.log_softmax(-1)
        for position, is_learned in enumerate(rows[row].mask):
            if is_learned:
                total = total - logprobs[position - 1, tokens[position]]
                num_tokens += 1
    loss = total / num_tokens
    torch.autograd.backward(loss)
    squares = [parameter.grad.square().sum() for parameter in model.parameters()]
    return float(loss.detach()), float(sum(squares)) ** 0.5


def test_the_loss_is_the_mean_over_the_learned_tokens_of_all_ranks_and_micro_batches(
    trained: list[dict[str, Any]],
) -> None:
    order = PromptOrder(NUM_ROWS, SEED)
    loss, norm = plain_gradient([order.at(idx)[1] for idx in range(BATCH_SIZE)])

    for each in trained:
        assert each["metrics"][0]["train/loss"] == pytest.approx(loss, abs=1e-6)
        assert each["metrics"][0]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_packed_is_unpacked_however_a_batch_is_dealt(trained: list[dict[str, Any]]) -> None:
    for one, other in pairwise(trained):
        assert one["parameters"].keys() == other["parameters"].keys()
        for name, values in one["parameters"].items():
            np.testing.assert_allclose(values, other["parameters"][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_pass_has_every_row_once_and_continues_without_a_cursor(num_ranks: int) -> None:
    def ids_from(step: int) -> list[str]:
        order = PromptOrder(NUM_ROWS, SEED)  # as a resumed run makes it
        ranks = [make_batches(rank, num_ranks, 2) for rank in range(num_ranks)]
        parts = [each.in_order(order, step).sample_ids for each in ranks]
        return sorted(sample_id for part in parts for sample_id in part)

    found = [sample_id for step in range(NUM_ROWS) for sample_id in ids_from(step)]

    passes = range(BATCH_SIZE)
    assert sorted(found) == sorted(f"e{k}/{row}/0" for k in passes for row in range(NUM_ROWS))
    assert ids_from(3) == found[3 * BATCH_SIZE : 4 * BATCH_SIZE]


def test_held_out_rows_are_read_once_in_the_files_order() -> None:
    ranks = [list(make_batches(rank, 2, 1).once()) for rank in range(2)]

    sizes = [sum(len(batch.sample_ids) for batch in parts) for parts in zip(*ranks, strict=True)]
    assert sizes == [6, 5]
    learned = sum(int(row.mask.sum()) for row in random_rows())
    assert sum(batch.metrics["tokens"] for batch in ranks[0]) == learned
