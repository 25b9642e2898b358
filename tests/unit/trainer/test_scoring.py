"""Scores from hidden states in chunks: the same numbers and gradients, in less memory."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from test_packing import builder, make_batch, random_samples
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from training_models import make_model
from transformers import AutoModelForCausalLM, GraniteConfig

from umbra.runtime.engine_api.kept_tokens import WHOLE, Truncation
from umbra.trainer.model.lora_layers import LoraLinear
from umbra.trainer.model.micro_batches import PaddedInputs
from umbra.trainer.model.packed_attention import PACKED_ATTENTION, register_packed_attention
from umbra.trainer.model.token_scoring import EntropyUse, score_hidden, score_logits
from umbra.trainer.model.train_model import (
    PassSettings,
    _Scorer,  # pyright: ignore[reportPrivateUsage]
)
from umbra.trainer.services.memory_needs import ModelSizes

NUM_TOKENS, HIDDEN, VOCAB = 53, 16, 300
PASSES = PassSettings(compute_dtype=torch.float32)
CHUNK = 7  # tokens; does not divide 53


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result: Any = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def chunk_scores(monkeypatch: pytest.MonkeyPatch, num_tokens: int, vocab: int = VOCAB) -> None:
    monkeypatch.setattr(
        "umbra.trainer.model.token_scoring._MAX_CHUNK_LOGITS", num_tokens * vocab + vocab - 1
    )


def make_head(dtype: torch.dtype, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.default_generator.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(VOCAB, (NUM_TOKENS,))


def scores_and_gradients(
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    temperature: float = 0.7,
    truncation: Truncation = WHOLE,
    use: EntropyUse = "measured",
    keeps_logits: bool | None = None,
) -> dict[str, Tensor]:
    """By autograd from all logits, or by `score_hidden` if it is known whether logits are kept."""
    head, hidden, targets = make_head(dtype, bias)
    if keeps_logits is None:
        logprobs, entropy = score_logits(head(hidden), targets, temperature, use, truncation)
    else:
        logprobs, entropy = score_hidden(
            head,
            hidden,
            targets,
            temperature,
            use,
            truncation=truncation,
            keeps_logits=keeps_logits,
        )
    assert entropy.requires_grad == (use == "trained")
    weights = torch.linspace(-1, 1, NUM_TOKENS)
    loss = (weights * logprobs.exp()).sum()
    if use == "trained":
        loss = loss + (weights.flip(0) * entropy).sum()
    torch.autograd.backward(loss)
    gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
    found = {"logprobs": logprobs, "entropy": entropy, "hidden": hidden.grad, **gradients}
    return {name: value.detach() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("truncation", [WHOLE, Truncation(0.5), Truncation(0.9, 40)])
@pytest.mark.parametrize(("bias", "use"), [(False, "trained"), (True, "measured")])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)],
)
def test_chunks_give_what_all_at_once_gives(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tolerance: float,
    bias: bool,
    use: EntropyUse,
    truncation: Truncation,
) -> None:
    whole = scores_and_gradients(dtype, bias, truncation=truncation, use=use)

    chunk_scores(monkeypatch, CHUNK)
    chunked, kept = (
        scores_and_gradients(dtype, bias, truncation=truncation, use=use, keeps_logits=keeps)
        for keeps in (False, True)
    )

    assert len(whole) == (5 if bias else 4)
    assert chunked.keys() == kept.keys() == whole.keys()
    assert all(torch.equal(kept[name], value) for name, value in chunked.items())
    for name, value in whole.items():
        assert chunked[name].dtype == value.dtype
        torch.testing.assert_close(chunked[name], value, atol=tolerance, rtol=tolerance)


def test_chunks_give_the_same_for_a_head_with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    base, hidden, targets = make_head(torch.float64, bias=True)
    head = LoraLinear(base.requires_grad_(False), 3, 1.5, torch.float64)
    inputs = hidden, head.lora_A.weight, head.lora_B.weight

    def scores() -> list[Tensor]:
        logprobs, _ = score_hidden(head, hidden, targets, 0.7, "none")
        weights = torch.linspace(-1, 1, NUM_TOKENS)
        return [logprobs, *torch.autograd.grad(logprobs.exp() @ weights.double(), inputs)]

    whole = scores()
    chunk_scores(monkeypatch, CHUNK)
    torch.testing.assert_close(scores(), whole, atol=1e-12, rtol=1e-12)
    head.is_adapted = False
    assert torch.equal(scores_of(head, hidden, targets), scores_of(base, hidden, targets))


def scores_of(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    return score_hidden(head, hidden, targets, 0.7, "none")[0]


def naively_kept(logits: Tensor, temperature: float, truncation: Truncation) -> list[int]:
    """The tokens that top-k and then top-p keep of one token's logits, in the textbook's way."""
    every: list[float] = logits.tolist()
    ordered = sorted(range(VOCAB), key=lambda token: -every[token])[: truncation.top_k or None]
    shares: list[float] = (logits[ordered] / temperature).softmax(0).tolist()
    kept: list[int] = []
    while sum(shares[: len(kept)]) < truncation.top_p and len(kept) < len(ordered):
        kept.append(ordered[len(kept)])
    return kept


@pytest.mark.parametrize(
    "truncation", [Truncation(0.5), Truncation(0.95), Truncation(1.0, 70), Truncation(0.6, 200)]
)
def test_tokens_are_scored_among_those_that_are_kept_and_themselves(
    truncation: Truncation,
) -> None:
    head, hidden, targets = make_head(torch.float64)
    temperature = 0.7

    logprobs, entropy = score_hidden(
        head, hidden, targets, temperature, "measured", truncation=truncation
    )

    outside = 0
    for idx, logits in enumerate(head(hidden).detach()):
        kept, target = naively_kept(logits, temperature, truncation), int(targets[idx])
        if target not in kept:
            outside += 1
            kept = [token for token in range(VOCAB) if logits[token] >= logits[target]]
        shares = (logits[kept] / temperature).softmax(0)
        torch.testing.assert_close(logprobs[idx], shares[kept.index(target)].log())
        torch.testing.assert_close(entropy[idx], -(shares * shares.log()).sum())
    assert 0 < outside < NUM_TOKENS


def test_what_is_left_out_has_no_gradient() -> None:
    logits = torch.randn(NUM_TOKENS, VOCAB, dtype=torch.float64, requires_grad=True)
    targets = logits.argmax(-1)

    logprobs, _ = score_logits(logits, targets, 0.7, "none", Truncation(1.0, 20))
    torch.autograd.backward(logprobs.sum())

    assert logits.grad is not None
    shares = logits.detach().topk(20).values.div(0.7).softmax(-1)
    assert ((logits.grad != 0).sum(-1) == 20).all()
    largest = logits.grad.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(largest, (1 - shares[:, 0]) / 0.7)


def test_no_tensor_has_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []
    for is_chunked in (False, True):
        if is_chunked:
            chunk_scores(monkeypatch, CHUNK)
        with LargestTensor() as watch:
            scores_and_gradients(torch.bfloat16, keeps_logits=False)
        largest.append(watch.numel)

    # else the head itself, and the sum of its gradient
    assert largest == [NUM_TOKENS * VOCAB, VOCAB * HIDDEN]


@pytest.mark.parametrize(("chunk", "num_again"), [(CHUNK, NUM_TOKENS), (NUM_TOKENS, 0)])
def test_logits_that_are_kept_and_those_of_one_chunk_are_computed_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int, num_again: int
) -> None:
    chunk_scores(monkeypatch, chunk)
    flops: list[int] = []
    for keeps_logits in (True, False):
        with FlopCounterMode(display=False) as counter:
            scores_and_gradients(torch.float32, keeps_logits=keeps_logits)
        flops.append(counter.get_total_flops())

    assert flops[1] - flops[0] == 2 * num_again * HIDDEN * VOCAB


def test_a_frozen_head_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_scores(monkeypatch, CHUNK)
    head, hidden, targets = make_head(torch.float32)
    head.requires_grad_(False)

    logprobs, entropy = score_hidden(head, hidden, targets, 1.0, "none")
    torch.autograd.backward(logprobs.sum())

    assert len(entropy) == 0
    assert hidden.grad is not None
    assert head.weight.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # with tied embeddings, and without
def test_a_models_gradients_are_the_same(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    samples = random_samples(1, [4, 6], [5, 9, 3, 8], group_size=2)
    ((micro_batch,),) = builder(packed=False).build(make_batch(samples))
    gradients: list[dict[str, Tensor]] = []
    for is_chunked in (False, True):
        if is_chunked:
            chunk_scores(monkeypatch, 4, vocab=64)
        model = make_model(kind).double()
        logprobs, _ = _Scorer(model, PASSES)(micro_batch.inputs, micro_batch.targets, "none")
        torch.autograd.backward(logprobs.square().sum())
        gradients.append({name: p.grad for name, p in model.named_parameters()})

    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_a_model_that_changes_its_logits_is_taken_at_its_word(packed: bool) -> None:
    samples = random_samples(2, [4], [5, 9], group_size=2)
    scorer = _Scorer(granite_model(packed), PASSES)

    ((micro_batch,),) = builder(packed).build(make_batch(samples))
    assert "changes the logits" in scorer.head_obstacle(micro_batch.inputs)
    scorer.uses_own_logits = True
    logprobs, _ = scorer(micro_batch.inputs, micro_batch.targets, "none")

    plain = granite_model(packed=False)
    expected: list[Tensor] = []
    for prompt, completion in sorted(samples, key=lambda sample: -len(sample[1])):
        every = plain(torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)
        wanted = torch.tensor(completion)
        expected.append(every[len(prompt) - 1 : -1].gather(1, wanted[:, None])[:, 0])
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=0)


FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3": ("Qwen3Config", {}, ""),
    "llama": ("LlamaConfig", {}, ""),
    "gemma": ("GemmaConfig", {}, ""),
    "olmo2": ("Olmo2Config", {}, ""),
    "gpt-neox": ("GPTNeoXConfig", {}, ""),
    "llama4": ("Llama4TextConfig", {"intermediate_size_mlp": 64, "num_local_experts": 2}, ""),
    "gemma2, a cap on logits": ("Gemma2Config", {}, "changes the logits"),
    "granite, logits divided": ("GraniteConfig", {"logits_scaling": 4.0}, "changes the logits"),
    "cohere, logits multiplied": ("CohereConfig", {}, "changes the logits"),
    "falcon-h1, logits multiplied": (
        "FalconH1Config",
        {"lm_head_multiplier": 0.5, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "changes the logits",
    ),
    "modernbert, a layer before the head": (
        "ModernBertDecoderConfig",
        {},
        "changes the decoder's hidden",
    ),
    "recurrent-gemma, a cap on logits": (
        "RecurrentGemmaConfig",
        {"num_key_value_heads": 1, "attention_window_size": 8, "lru_width": 32},
        "changes the logits",
    ),
    "inkling, hidden states divided": ("InklingTextConfig", {}, "changes the decoder's hidden"),
    "roberta, a layer before the head": (
        "RobertaConfig",
        {"is_decoder": True},
        "changes the decoder's hidden",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_does_beside_applying_its_head_is_found(tmp_path: Path, family: str) -> None:
    name, changes, said = FAMILIES[family]
    scorer = _Scorer(small_model(name, changes), PASSES)
    token_ids = torch.tensor([[5, 9, 33, 70, 12, 20]])
    inputs = PaddedInputs(token_ids=token_ids, predicting=torch.arange(6))
    targets = torch.tensor([9, 33, 70, 12, 20, 41])

    with torch.no_grad():
        obstacle = scorer.head_obstacle(inputs)
        scorer.uses_own_logits = bool(obstacle)
        logprobs, _ = scorer(inputs, targets, "none")
        logits: Tensor = cast("Any", scorer.model)(input_ids=token_ids, use_cache=False).logits

    assert (said in obstacle) if said else not obstacle
    cast("Any", scorer.model).save_pretrained(tmp_path)
    is_known = "a layer" not in family  # by config.json
    assert ModelSizes.read(tmp_path).changes_logits == (bool(said) and is_known)
    expected = logits[0].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def small_model(name: str, changes: dict[str, Any]) -> Any:
    """With logits so small that a cap hardly changes them."""
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    kind: Any = getattr(transformers, name)
    known = kind().to_dict()
    torch.default_generator.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    config = kind(**({key: value for key, value in sizes.items() if key in known} | changes))
    return auto.from_config(config).float().eval()


def granite_model(packed: bool) -> Any:
    torch.default_generator.manual_seed(3)
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        initializer_range=0.2,
        logits_scaling=0.25,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config).eval()
    if packed:
        register_packed_attention()
        model.set_attn_implementation(PACKED_ATTENTION)
    return model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_memory_is_bounded_by_a_chunk() -> None:
    """32768 tokens of a vocabulary of 152064: 20 GB of float32 logits."""
    device = torch.device("cuda")
    head = nn.Linear(256, 152064, bias=False, dtype=torch.bfloat16, device=device)
    hidden = torch.randn(32768, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    targets = torch.randint(152064, (32768,), device=device)
    torch.cuda.reset_peak_memory_stats()

    logprobs, _ = score_hidden(head, hidden, targets, 0.9, "measured")
    torch.autograd.backward(logprobs.sum())

    assert torch.cuda.max_memory_allocated() < 4 << 30
    assert head.weight.grad is not None
