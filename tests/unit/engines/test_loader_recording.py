"""Weights that a loader leaves out are noticed, however it writes."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from umbra.engines.loading.loader_recording import LoaderRecording
from umbra.runtime.errors import WeightSyncError


def fused_model() -> nn.Module:
    model = nn.Module()
    model.qkv = nn.Parameter(torch.zeros(6, 4))
    model.norm = nn.Parameter(torch.zeros(4))
    model.embedding = nn.Parameter(torch.zeros(8, 4))  # with two rows of padding
    return model


def sources() -> dict[str, Tensor]:
    image = torch.arange(4 * 4 + 2 * 4 + 4 + 6 * 4 + 3, dtype=torch.float64)
    parts = image.split([16, 8, 4, 24, 3])
    shapes = {"q": (4, 4), "k": (2, 4), "norm": (4,), "embedding": (6, 4), "other": (3,)}
    return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def load(model: nn.Module, given: Iterable[tuple[str, Tensor]], *, only: set[str]) -> None:
    weights = dict(given)
    qkv, norm, embedding = (parameter.data for parameter in model.parameters())
    if "q" in only:
        qkv.narrow(0, 0, 4).copy_(weights["q"])
        qkv.narrow(0, 0, 4).copy_(weights["q"])  # twice counts once
    if "k" in only:
        qkv.narrow(0, 4, 2).narrow(1, 0, 2).copy_(weights["k"].narrow(1, 0, 2))
        qkv.narrow(0, 4, 2).narrow(1, 2, 2).copy_(weights["k"].narrow(1, 2, 2).float())
    if "norm" in only:
        norm.copy_(weights["norm"].to(torch.bfloat16))
    if "embedding" in only:
        embedding[:6].copy_(weights["embedding"])
        embedding[6:].fill_(0)


@pytest.mark.parametrize("is_inference", [False, True])
def test_all_that_is_read_and_written_counts(is_inference: bool) -> None:
    model, weights = fused_model(), sources()

    with torch.inference_mode(is_inference), LoaderRecording(model) as coverage:
        load(model, coverage.watch(weights.items()), only={"q", "k", "norm", "embedding"})

    coverage.check_filled("SGLang")
    assert coverage.unread() == ["other"]


@pytest.mark.parametrize(
    ("left_out", "text"), [("q", "qkv"), ("k", "qkv"), ("norm", "norm"), ("embedding", "embedding")]
)
def test_a_parameter_without_its_value_is_named(left_out: str, text: str) -> None:
    model, weights = fused_model(), sources()

    with LoaderRecording(model) as coverage:
        load(
            model,
            coverage.watch(weights.items()),
            only={"q", "k", "norm", "embedding"} - {left_out},
        )

    with pytest.raises(WeightSyncError, match=f"do not fill 1 of SGLang's parameters: {text}"):
        coverage.check_filled("SGLang")
    assert left_out in coverage.unread()


def test_a_tensor_that_replaces_a_parameter_fills_it() -> None:
    model, weights = fused_model(), sources()

    with LoaderRecording(model) as coverage:
        load(model, coverage.watch(weights.items()), only={"q", "k", "embedding"})
        model.get_parameter("norm").data = weights["norm"].float()

    coverage.check_filled("SGLang")


def test_tensors_that_come_one_at_a_time_are_distinguished_though_they_share_memory() -> None:
    model, weights = fused_model(), sources()
    memory = torch.empty(24, dtype=torch.float64)

    def one_at_a_time() -> Iterator[tuple[str, Tensor]]:
        for name in ("other", "norm", "q"):
            tensor = memory[: weights[name].numel()].view(weights[name].shape)
            tensor.copy_(weights[name])
            yield name, tensor
            if name == "norm":
                yield "norm_again", tensor

    with LoaderRecording(model) as coverage:
        for name, tensor in coverage.watch(one_at_a_time()):
            if name == "norm_again":
                model.get_parameter("norm").data.copy_(tensor)
            if name == "q":
                model.get_parameter("qkv").data[:4].copy_(tensor)

    assert coverage.unread() == ["other"]


def test_what_is_done_in_a_pause_is_not_the_loaders() -> None:
    model, weights = fused_model(), sources()
    qkv, norm = model.get_parameter("qkv"), model.get_parameter("norm")

    with LoaderRecording(model) as recording:
        for name, tensor in recording.watch(weights.items()):
            if name == "norm":
                norm.data.copy_(tensor)
            with recording.paused():
                if name == "q":
                    qkv.data[:4].copy_(tensor)
                torch.zeros(1).item()

    assert recording.decides == ""
    assert [copy.name for copy in recording.copies] == ["norm"]
    assert (recording.num_written(norm), recording.num_written(qkv)) == (4, 0)
    assert recording.read_otherwise == {"q"}  # whatever was made of it needs it again
