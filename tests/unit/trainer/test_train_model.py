"""A model in training, on one rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import pytest
import torch
import torch.distributed
from test_packing import builder, make_batch, random_samples
from test_scoring import PASSES, granite_model
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_models import make_model

from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.train_model import PreparedModel, TrainModel
from umbra.trainer.world.mesh import Mesh

_dist: Final[Any] = torch.distributed
TRAIN = TrainSection(steps=1)
pytestmark = pytest.mark.slow  # the first loads FSDP


@pytest.fixture
def mesh() -> Generator[DeviceMesh]:
    _dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # without threads
    try:
        yield Mesh.of_group(torch.device("cpu")).fsdp
    finally:
        _dist.destroy_process_group()


def test_tied_parameters_are_trained_once_and_published_by_both_names(mesh: DeviceMesh) -> None:
    policy = TrainModel(PreparedModel(make_model("qwen3"), False), mesh, PASSES, TRAIN)

    first, second = "model.embed_tokens.weight", "lm_head.weight"

    assert policy.published[first] is policy.published[second]
    assert first in policy.parameters
    assert second not in policy.parameters


def test_a_reference_takes_the_policys_parameters(mesh: DeviceMesh) -> None:
    policy = TrainModel(PreparedModel(make_model("llama"), False), mesh, PASSES, TRAIN)
    reference = TrainModel(PreparedModel(make_model("llama"), False), mesh, PASSES)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(1.0)
    expected = {name: p.clone() for name, p in policy.parameters.items()}

    reference.copy_from(policy)

    for model in (policy, reference):
        for name, parameter in model.parameters.items():
            assert torch.equal(parameter, expected[name]), name


def test_a_model_that_changes_its_logits_scores_by_its_own(mesh: DeviceMesh) -> None:
    ((prompt, completion),) = samples = random_samples(2, [4], [5], group_size=1)
    ((micro_batch,),) = builder(packed=False).build(make_batch(samples))
    logits = granite_model(packed=False)(torch.tensor([[*prompt, *completion]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    policy = TrainModel(PreparedModel(granite_model(packed=False), False), mesh, PASSES, TRAIN)

    scores = policy.score(micro_batch)

    wanted = expected.gather(1, torch.tensor(completion)[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs, wanted, atol=1e-5, rtol=0)
