"""Rotary frequencies are those of the longest context, whatever shares a batch with a sample."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_models import make_model

from umbra.trainer.model.model_loading import fix_rotary_frequencies

TRAINED_LEN = 32
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED_LEN},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "original_max_position_embeddings": TRAINED_LEN,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 6.0],
    },
}


def make(kind: str, max_positions: int = 128) -> Any:
    rope = {"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}
    return make_model("llama", rope_parameters=rope, max_position_embeddings=max_positions)


@torch.no_grad()
def logprobs(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Of the first row, which the others make longer by padding."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return model(padded).logits[0, : len(rows[0])].log_softmax(-1)


@pytest.mark.parametrize("context_len", [16, TRAINED_LEN, TRAINED_LEN + 1, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_scored_as_transformers_does_at_the_longest_context(
    kind: str, context_len: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    short, long = (torch.randint(2, 60, (n,), generator=draw) for n in (10, context_len))
    expected = logprobs(make(kind, TRAINED_LEN if kind == "dynamic" else 128), [short, long])
    model = make(kind, TRAINED_LEN if kind == "dynamic" else 128)

    fix_rotary_frequencies(model, context_len)

    alone = logprobs(model, [short])
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logprobs(model, [short, long]), alone, rtol=0, atol=1e-5)


def test_the_length_matters_for_these_models() -> None:
    """Else the test above would show nothing."""
    draw = torch.Generator().manual_seed(0)
    short, long = (torch.randint(2, 60, (n,), generator=draw) for n in (10, 100))

    for kind, max_positions in (("longrope", 128), ("dynamic", TRAINED_LEN)):
        model = make(kind, max_positions)
        beside, alone = logprobs(model, [short, long]), logprobs(model, [short])
        assert (beside - alone).abs().max() > 0.05, kind


def test_types_of_layers_have_frequencies_of_their_own() -> None:
    model = make("longrope")
    whole = model.model.rotary_emb
    expected = make("longrope")
    fix_rotary_frequencies(expected, 100)

    class ByLayerType(torch.nn.Module):
        """As in models whose windowed layers have another rotary embedding."""

        def __init__(self) -> None:
            super().__init__()
            self.rope_type = {"full_attention": "longrope", "sliding_attention": "default"}

        def forward(self, x: torch.Tensor, positions: torch.Tensor, layer_type: str) -> object:
            assert layer_type == "full_attention"
            return whole(x, positions)

    by_layer_type = ByLayerType()
    whole.rope_type, model.model.rotary_emb = "longrope", torch.nn.ModuleList([by_layer_type])

    fix_rotary_frequencies(model, 100)

    assert by_layer_type.rope_type["full_attention"] == "fixed"
    assert torch.equal(whole.inv_freq, expected.model.rotary_emb.inv_freq)
