"""A model in training, on one rank."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import pytest
import torch
import torch.distributed
from minimal_config import config_with
from test_packing import builder, make_batch, random_samples
from test_scoring import PASSES, granite_model
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from training_models import VOCAB_SIZE, make_model, save_model
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from umbra.runtime.weights.shards import local_part
from umbra.trainer.algorithms.base import load_loss
from umbra.trainer.config.trainer_config import LoraSection, TrainSection
from umbra.trainer.data.train_batch import PROXIMAL_LOGPROBS, random_batch
from umbra.trainer.model.compiling import CompiledFunction
from umbra.trainer.model.lora_layers import LoraAdapters
from umbra.trainer.model.model_loading import load_model, replace_head
from umbra.trainer.model.optimizer import ModelOptimizer, parameter_kinds
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.train_model import PreparedModel, TrainModel
from umbra.trainer.objective import PolicyObjective
from umbra.trainer.step import MetricTotals
from umbra.trainer.world.mesh import Mesh

_dist: Final[Any] = torch.distributed
_aten: Final[Any] = torch.ops.aten
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


@pytest.mark.filterwarnings("default")  # torch warns while it compiles
def test_padding_runs_the_code_that_samples_had_compiled(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no sample of a rank has an advantage, the others would wait for it to compile."""
    library: Any = torch
    counters = library._dynamo.utils.counters["stats"]
    monkeypatch.setattr(CompiledFunction, "_is_possible", True)
    monkeypatch.setattr(torch, "compile", partial(library.compile, backend="eager"))  # in seconds
    model = make_model()
    register_packed_attention()
    model.set_attn_implementation(PACKED_ATTENTION)
    policy = TrainModel(PreparedModel(model, True), mesh, replace(PASSES, compiles=True), TRAIN)
    batch = random_batch(np.array([5, 9, 7, 8]), 6, 4, VOCAB_SIZE, seed=0)
    nothing = replace(batch, mask=np.zeros_like(batch.mask))
    found: list[int] = []

    for each in (batch, nothing):
        ((micro_batch,),) = builder(packed=True).build(each)
        policy.backward(policy.score(micro_batch).logprobs.sum(), is_last=True)
        found.append(counters["unique_graphs"])

    assert found[0] == found[1] > 0


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


def test_a_frozen_model_in_the_compute_dtype_scores_as_one_in_the_master_dtype(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    config = config_with("model.dtype=bfloat16", model_dir=save_model(tmp_path / "model", "llama"))
    trained, frozen = (load_model(config, mesh, trains=trains) for trains in (True, False))
    batch = make_batch(random_samples(2, [4], [5], group_size=1))
    ((micro_batch,),) = builder(packed=True, dtype=torch.bfloat16).build(batch)

    with torch.no_grad():
        for parameter in trained.parameters.values():
            parameter.mul_(1 + 2**-12)  # less than bfloat16 resolves, for most elements
    before = frozen.measure(micro_batch).logprobs
    frozen.copy_from(trained)

    assert {p.dtype for p in trained.parameters.values()} == {torch.float32}
    assert {p.dtype for p in frozen.parameters.values()} == {torch.bfloat16}
    assert torch.equal(frozen.measure(micro_batch).logprobs, trained.measure(micro_batch).logprobs)
    assert not torch.equal(before, frozen.measure(micro_batch).logprobs)


@pytest.mark.parametrize("is_critic", [False, True])
def test_kinds_of_parameters_are_trained_as_torchs_adamw_trains_groups(
    mesh: DeviceMesh, is_critic: bool
) -> None:
    train = replace(
        TRAIN,
        learning_rate=0.1,
        weight_decay=0.1,
        max_grad_norm=0.0,
        embedding_lr_ratio=0.3,
        embedding_weight_decay=0.0,
        vector_lr_ratio=3.0,
        vector_weight_decay=0.2,
    )
    models = [make_model("qwen2", tie_word_embeddings=False) for _ in range(2)]
    for model in models if is_critic else ():
        replace_head(model, torch.float32)
        torch.nn.init.zeros_(model.lm_head.weight)
    ours = TrainModel(PreparedModel(models[0], False, is_critic=is_critic), mesh, PASSES, train)
    plain = dict(models[1].named_parameters())
    embeddings = [plain["model.embed_tokens.weight"]] + [plain["lm_head.weight"]] * (not is_critic)
    vectors = [p for name, p in plain.items() if "norm" in name or "bias" in name]
    others = [p for p in plain.values() if not any(p is each for each in embeddings + vectors)]
    adamw: Any = torch.optim.AdamW(
        [
            {"params": embeddings, "lr": 0.1 * 0.3, "weight_decay": 0.0},
            {"params": vectors, "lr": 0.1 * 3.0, "weight_decay": 0.2},
            {"params": others, "lr": 0.1, "weight_decay": 0.1},
        ],
        fused=True,
    )

    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in ours.parameters.items():
            plain[name].grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(plain[name].grad)
        ours.step(step)
        adamw.step()

    for name, parameter in ours.parameters.items():
        assert torch.equal(local_part(parameter), plain[name]), name


def test_biases_of_a_stack_of_experts_are_vectors_to_each_optimizer() -> None:
    config = GptOssConfig(num_local_experts=4, hidden_size=64, intermediate_size=64)
    experts: Any = GptOssExperts(config)
    experts.get_output_embeddings = lambda: None

    kinds = parameter_kinds(experts, is_critic=False)

    assert kinds == {
        "gate_up_proj": "hidden",
        "gate_up_proj_bias": "vector",
        "down_proj": "hidden",
        "down_proj_bias": "vector",
    }
    for name in ("muon", "adamw_8bit"):
        ours = ModelOptimizer(
            dict(experts.named_parameters()), kinds, TrainSection(steps=1, optimizer=name)
        )
        ours.start()
        moments = {state for state in ours.states if state.startswith("down_proj_bias")}
        assert moments == {f"down_proj_bias.{each}" for each in ("step", "exp_avg", "exp_avg_sq")}


def test_adapters_are_of_their_layers_kind_and_convolutions_and_critics_heads_of_none() -> None:
    model = make_model("qwen3", tie_word_embeddings=False)
    model.model.convolution = torch.nn.Conv1d(4, 4, 3)
    targets = ("embed_tokens", "lm_head", "q_proj")
    LoraAdapters(model, LoraSection(rank=2, targets=targets), torch.float32)

    kinds, of_critic = (parameter_kinds(model, is_critic=is_critic) for is_critic in (False, True))

    assert {name for name, kind in kinds.items() if kind == "embedding"} == {
        "model.embed_tokens.weight",
        "model.embed_tokens.lora_embedding_A",
        "model.embed_tokens.lora_embedding_B",
        "lm_head.weight",
        "lm_head.lora_A.weight",
        "lm_head.lora_B.weight",
    }
    assert kinds["model.convolution.weight"] == of_critic["lm_head.weight"] == "other"
    assert kinds["model.norm.weight"] == "vector"
    hidden = [f"self_attn.q_proj{part}.weight" for part in ("", ".lora_A", ".lora_B")]
    assert {kinds[f"model.layers.0.{name}"] for name in hidden} == {"hidden"}


def test_a_model_that_changes_its_logits_scores_by_its_own(mesh: DeviceMesh) -> None:
    ((prompt, completion),) = samples = random_samples(2, [4], [5], group_size=1)
    ((micro_batch,),) = builder(packed=False).build(make_batch(samples))
    logits = granite_model(packed=False)(torch.tensor([[*prompt, *completion]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    policy = TrainModel(PreparedModel(granite_model(packed=False), False), mesh, PASSES, TRAIN)

    scores = policy.score(micro_batch)

    wanted = expected.gather(1, torch.tensor(completion)[:, None])[:, 0]
    torch.testing.assert_close(scores.logprobs, wanted, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("default")  # torch warns while it compiles
@pytest.mark.parametrize("num_layers", [1, 3])
def test_sharded_blocks_are_compiled_once_for_all(
    num_layers: int, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = torch
    monkeypatch.setattr(torch, "compile", partial(library.compile, backend="aot_eager"))
    library._dynamo.reset()
    attempts = library._dynamo.utils.counters["aot_autograd"]
    before = attempts["total"]
    model = make_model("qwen3", num_hidden_layers=num_layers)
    replace_head(model, torch.float32)  # whose scores are not compiled
    passes = replace(PASSES, compiles=True)
    critic = TrainModel(PreparedModel(model, False, is_critic=True), mesh, passes, TRAIN)

    for lens in ([5, 9], [7, 4]):
        batch = make_batch(random_samples(2, [4, 6], lens, group_size=1))
        ((micro_batch,),) = builder(packed=False).build(batch)
        critic.backward(critic.score(micro_batch).logprobs.sum(), is_last=True)

    assert attempts["total"] - before == 1


class Waits(TorchDispatchMode):
    """Notes the operators for which the host would wait for a GPU."""

    names: ClassVar[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select):
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("loss", ["clipped", "decoupled", "gspo", "cispo"])
def test_the_host_waits_for_no_result_of_a_micro_batch(mesh: DeviceMesh, loss: str) -> None:
    samples = random_samples(2, [4, 6], [5, 3, 7, 2], group_size=2)
    ((micro_batch,),) = builder(packed=True).build(make_batch(samples))
    model = make_model()
    register_packed_attention()
    model.set_attn_implementation(PACKED_ATTENTION)
    policy = TrainModel(PreparedModel(model, True), mesh, PASSES, TRAIN)
    micro_batch.columns[PROXIMAL_LOGPROBS] = policy.score(micro_batch).logprobs.detach()
    objective, totals = PolicyObjective(TRAIN, load_loss(loss)), MetricTotals()

    Waits.names.clear()
    with Waits():
        output = objective(policy.score(micro_batch, objective.entropy_use), micro_batch)
        policy.backward(output.loss, is_last=True)
        totals.add(output.metrics, micro_batch.weights)

    assert Waits.names == []
