"""The same weights and tokens give the logits that transformers gives."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import forced_logprobs, load_model, make_core, make_request, run_to_end
from model_factory import KINDS, make_model, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

VOCAB_SIZE = 97
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode_give_the_logprobs_of_transformers(
    model_folder: Callable[[str], Path], kind: str, dtype: str
) -> None:
    reference = make_model(kind).to(getattr(torch, dtype))
    sequences = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 100)).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor(sequences)).logits, -1)

    found = forced_logprobs(load_model(model_folder(kind), dtype), sequences, num_prompt=70)

    torch.testing.assert_close(found, expected[:, 69:], rtol=0, atol=TOLERANCES[dtype])


def test_a_head_of_its_own_is_used_though_the_config_ties_it(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"]) * 0.2
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sequences = np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 30)).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor(sequences)).logits, -1)

    found = forced_logprobs(load_model(tmp_path), sequences, num_prompt=20)

    torch.testing.assert_close(found, expected[:, 19:], rtol=0, atol=TOLERANCES["float32"])


@pytest.mark.parametrize("kind", ["qwen3", "llama3-rope-bias"])
def test_bfloat16_follows_transformers_within_its_precision(
    model_folder: Callable[[str], Path], kind: str
) -> None:
    reference = make_model(kind).bfloat16()
    sequences = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 60)).tolist()
    with torch.no_grad():
        expected = torch.softmax(reference(torch.tensor(sequences)).logits.float(), -1)

    model = load_model(model_folder(kind), "bfloat16")
    found = forced_logprobs(model, sequences, num_prompt=30).float().exp()

    assert (found - expected[:, 29:]).abs().mean() < 2e-3


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_have_the_logprobs_of_a_plain_forward_pass(
    model_folder: Callable[[str], Path], kind: str
) -> None:
    """Of many lengths, in several prefills, beside requests that sample."""
    rng = np.random.default_rng(2)

    def some_tokens(limit: int) -> list[int]:
        return rng.integers(0, VOCAB_SIZE, rng.integers(1, limit)).tolist()

    wholes = [(some_tokens(50), some_tokens(70)) for _ in range(24)]
    asked = [
        make_request(
            i, prompt, forced=np.array(forced, np.int32), max_new_tokens=len(forced), position=4
        )
        for i, (prompt, forced) in enumerate(wholes)
    ]
    core = make_core(load_model(model_folder(kind), "float64"), prefill_num_tokens=300)

    results = run_to_end(core, [*asked, make_request(99, [1, 2], max_new_tokens=5)])

    reference = make_model(kind).double()
    for request, (prompt, forced) in zip(asked, wholes, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *forced]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(forced)[:, None])[:, 0]
        completion = results[request.id]
        assert (completion.tokens, completion.reason) == (forced, "length")
        found = torch.tensor(completion.logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # float32 on the wire
    assert len(results[99].tokens) == 5


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_returned_logprobs_are_those_of_the_distribution_sampled_from(
    model_folder: Callable[[str], Path], kind: str, temperature: float
) -> None:
    rng = np.random.default_rng(1)
    requests = [
        make_request(
            i,
            rng.integers(0, VOCAB_SIZE, rng.integers(1, 50)).tolist(),
            max_new_tokens=int(rng.integers(1, 70)),
            temperature=temperature,
        )
        for i in range(12)
    ]

    results = run_to_end(make_core(load_model(model_folder(kind), "float64")), requests)

    reference = make_model(kind).double()
    for request in requests:
        completion = results[request.id]
        assert completion.reason == "length"
        assert len(completion.tokens) == request.max_new_tokens
        tokens = torch.tensor([*request.tokens.tolist(), *completion.tokens])
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
        logprobs = logprobs[len(request.tokens) - 1 : -1]
        chosen = torch.tensor(completion.tokens)
        expected = logprobs.gather(1, chosen[:, None])[:, 0]
        found = torch.tensor(completion.logprobs, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # float32 on the wire
        if temperature == 0:
            assert torch.equal(logprobs.argmax(-1), chosen)
