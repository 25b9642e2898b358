"""Later versions reach a model by copies that give the same bytes as its loader."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from sharded_source import Cut, ShardedSource, rows
from torch import Tensor, nn

from umbra.engines.loading.loader_recording import LoaderRecording, WatchedLoader
from umbra.engines.loading.weight_source import WeightSource
from umbra.engines.loading.worker_updates import WorkerUpdates
from umbra.runtime.errors import EngineError
from umbra.runtime.weights.copy_planner import ShardBlock

Weights = Iterable[tuple[str, Tensor]]


class NotingLoader(WatchedLoader):
    """`loaded` has the layers of each load: None for all."""

    def __init__(self, model: Any) -> None:
        super().__init__("the test", model, model.load_weights)
        self.loaded: list[Sequence[nn.Module] | None] = []
        self.names: list[list[str]] = []

    def record(self, source: WeightSource) -> tuple[LoaderRecording, Mapping[nn.Module, str]]:
        recorded = super().record(source)
        self.loaded.append(None)
        return recorded

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        found = list(tensors)
        super().load(layers, iter(found))
        self.loaded.append(layers)
        self.names.append([name for name, _ in found])


class Layer(nn.Module):
    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


ONE_RANK = rows(1)
HIDDEN, HEADS, KV_HEADS, VOCAB, PADDED, EXPERTS, INNER = 8, 8, 4, 22, 32, 4, 6


class Memory:
    """Where a source has its blocks."""


class Model(nn.Module):
    """One worker's part of a small model, with the idioms of vLLM's loaders."""

    def __init__(self, worker: int = 0, num_workers: int = 1) -> None:
        super().__init__()
        self.worker, self.num_workers = worker, num_workers
        cut = num_workers
        self.embedding = Layer(PADDED // cut, HIDDEN)
        self.head = Layer(PADDED // cut, HIDDEN)
        self.head.weight = self.embedding.weight  # tied
        self.qkv = Layer((HEADS + 2 * KV_HEADS) // cut, HIDDEN)
        self.out = Layer(HIDDEN, HEADS // cut)
        self.gate_up = Layer(2 * INNER // cut, HIDDEN)
        self.experts = Layer(EXPERTS, 2 * INNER // cut, HIDDEN)
        self.norm = Layer(HIDDEN, dtype=torch.float32)
        self.bias = Layer()

    def mine(self, tensor: Tensor, dim: int) -> Tensor:
        size = tensor.shape[dim] // self.num_workers
        return tensor.narrow(dim, self.worker * size, size)

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        cut = self.num_workers
        match name.split("."):
            case ["embedding"] | ["head"]:
                per_worker = PADDED // cut
                start = min(self.worker * per_worker, VOCAB)
                stop = min(start + per_worker, VOCAB)
                data = self.embedding.weight.data
                data[: stop - start].copy_(tensor[start:stop])
                data[stop - start :].fill_(0)
            case ["q" | "k" | "v" as which]:
                starts = {"q": 0, "k": HEADS // cut, "v": (HEADS + KV_HEADS) // cut}
                part = self.mine(tensor, 0)
                self.qkv.weight.data.narrow(0, starts[which], len(part)).copy_(part)
            case ["out"]:
                self.out.weight.data.copy_(self.mine(tensor, 1))
            case ["gate" | "up" as which]:
                part = self.mine(tensor, 0)
                half = self.gate_up.weight.data.chunk(2)[which == "up"]
                half.copy_(part)
            case ["expert", number, "gate" | "up" as which]:
                half = self.experts.weight.data[int(number)].chunk(2)[which == "up"]
                half.copy_(self.mine(tensor, 0))
            case ["norm"]:
                self.norm.weight.data.copy_(tensor)
            case ["bias"]:
                self.bias.weight.data.copy_(tensor)
            case _:
                raise AssertionError(name)


def version(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (VOCAB, HIDDEN),
        "q": (HEADS, HIDDEN),
        "k": (KV_HEADS, HIDDEN),
        "v": (KV_HEADS, HIDDEN),
        "out": (HIDDEN, HEADS),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        **{
            f"expert.{number}.{which}": (INNER, HIDDEN)
            for number in range(EXPERTS)
            for which in ("gate", "up")
        },
        "norm": (HIDDEN,),
        "bias": (),
    }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def source_of(
    weights: dict[str, Tensor], cut: Cut = ONE_RANK, wire: torch.dtype = torch.bfloat16
) -> ShardedSource:
    return ShardedSource(weights, {"head": "embedding"}, cut, wire)


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    return {
        name: p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, p in model.named_parameters()
    }


def loaded(model: Any, source: WeightSource) -> dict[str, bytes]:
    """What the loader alone makes."""
    with torch.no_grad():
        model.load_weights(source.tensors())
    return bytes_of(model)


def forget(model: nn.Module) -> None:
    """As in a sleep that drops the weights."""
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)


def planned(model: nn.Module) -> tuple[WorkerUpdates, NotingLoader]:
    loader = NotingLoader(model)
    return WorkerUpdates(model, loader), loader


def by_experts(name: str, shape: tuple[int, ...]) -> list[ShardBlock]:
    """Expert parallel, with uneven shards of everything else."""
    if not shape or name.startswith("expert."):
        return [ShardBlock(tuple(0 for _ in shape), shape)]
    rest = (0,) * (len(shape) - 1)
    first = 1 + shape[0] // 3
    blocks = [(0, first), (first, shape[0] - first)]
    return [ShardBlock((start, *rest), (size, *shape[1:])) for start, size in blocks if size]


@pytest.mark.parametrize("cut", [rows(1), rows(2), rows(3), rows(5), by_experts])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("is_inference", [False, True])
def test_a_replay_gives_the_bytes_of_the_loader(
    cut: Cut, num_workers: int, is_inference: bool
) -> None:
    for worker in range(num_workers):
        model = Model(worker, num_workers)
        updates, loader = planned(model)
        with torch.inference_mode(is_inference):
            updates.load_model(source_of(version(1), cut))
            assert bytes_of(model) == loaded(Model(worker, num_workers), source_of(version(1)))
            forget(model)
            source = source_of(version(2), cut)
            updates.load_model(source)

        assert bytes_of(model) == loaded(Model(worker, num_workers), source_of(version(2)))
        assert loader.loaded == [None]
        assert source.whole_names == []


def test_a_plan_outlives_a_change_of_shards() -> None:
    model = Model()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1), rows(2)))

    updates.load_model(source_of(version(2), rows(3)))

    assert bytes_of(model) == loaded(Model(), source_of(version(2)))
    assert loader.loaded == [None]


def test_weights_are_cast_as_the_loader_would_get_them() -> None:
    """Masters in float32 travel in bfloat16, also to a parameter in float32."""
    weights = version(1, torch.float32)
    model = Model()
    updates, _ = planned(model)
    updates.load_model(source_of(weights, rows(2)))

    weights["norm"].add_(1e-3)
    updates.load_model(source_of(weights, rows(2)))

    assert torch.equal(model.norm.weight, weights["norm"].bfloat16().float())
    assert not torch.equal(model.norm.weight, weights["norm"])


def test_it_is_recorded_again_when_other_tensors_come_or_parameters_move() -> None:
    model = Model()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1)))

    updates.load_model(source_of(version(2), wire=torch.float32))
    assert loader.loaded == [None, None]

    model.qkv.weight.data = model.qkv.weight.data.clone()
    updates.load_model(source_of(version(3), wire=torch.float32))

    assert loader.loaded == [None, None, None]
    assert bytes_of(model) == loaded(Model(), source_of(version(3), wire=torch.float32))


def overwrite(source: ShardedSource, weights: dict[str, Tensor]) -> None:
    """Gives it the next version in the memory that it has, as an optimizer does."""
    for idx, entry in enumerate(source.manifest.entries):
        for number, block in enumerate(source.blocks(idx)):
            part = weights[entry.name]
            for dim, (start, size) in enumerate(zip(block.starts, block.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            source.block(idx, number).copy_(part)


@pytest.mark.parametrize("is_inference", [False, True])
def test_copies_are_prepared_once_for_versions_in_the_same_memory(is_inference: bool) -> None:
    model = Model()
    updates, loader = planned(model)
    kept, other = (source_of(version(seed), rows(3)) for seed in (1, 2))
    kept.memory, other.memory = Memory(), Memory()
    with torch.inference_mode(is_inference):
        updates.load_model(kept)
        updates.load_model(kept)  # prepares
        for seed in (3, 4):
            overwrite(kept, version(seed))
            forget(model)
            kept.num_blocks = 0
            updates.load_model(kept)
            assert bytes_of(model) == loaded(Model(), source_of(version(seed)))
            assert kept.num_blocks == 0

        updates.load_model(other)
        assert bytes_of(model) == loaded(Model(), source_of(version(2)))
        updates.load_model(kept)

    assert bytes_of(model) == loaded(Model(), source_of(version(4)))
    assert loader.loaded == [None]


def test_masters_are_cast_each_time_that_prepared_copies_run() -> None:
    """One parameter is in float32, but gets what travels in bfloat16."""
    model = Model()
    updates, _ = planned(model)
    source = source_of(version(1, torch.float32), rows(2))
    source.memory = Memory()
    for seed in (1, 2, 3):
        weights = version(seed, torch.float32)
        overwrite(source, weights)
        updates.load_model(source)
        assert torch.equal(model.norm.weight, weights["norm"].bfloat16().float())

    assert bytes_of(model) == loaded(Model(), source_of(version(3, torch.float32)))


def test_prepared_copies_are_not_used_after_parameters_have_moved() -> None:
    model = Model()
    updates, loader = planned(model)
    source = source_of(version(1), rows(2))
    source.memory = Memory()
    for _ in range(3):
        updates.load_model(source)

    model.qkv.weight.data = torch.full_like(model.qkv.weight.data, torch.nan)
    updates.load_model(source)

    assert bytes_of(model) == loaded(Model(), source_of(version(1)))
    assert loader.loaded == [None, None]


class Doubling(Model):
    """Computes with what it loads into one layer."""

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "out":
            self.out.weight.data.copy_(tensor * 2)
        else:
            super().load(name, tensor)


class InPlace(Model):
    def load(self, name: str, tensor: Tensor) -> None:
        super().load(name, tensor)
        if name == "out":
            self.out.weight.data.mul_(2)


class Deriving(Model):
    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.absorbed = self.out.weight.data * 2


class Moving(Model):
    def load(self, name: str, tensor: Tensor) -> None:
        if name == "out":
            self.out.weight.data = tensor.t().contiguous().t()
        else:
            super().load(name, tensor)


class Flattening(Model):
    """Reads a tensor in an order that no block can give, but only copies."""

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "out":
            pairs = tensor.view(HIDDEN // 2, 2, HEADS).transpose(0, 1)  # even rows, then odd
            self.out.weight.data.view(2, HIDDEN // 2, HEADS).copy_(pairs)
        else:
            super().load(name, tensor)


class OutOfPlace(Model):
    """Names its target as a keyword."""

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "out":
            torch.mul(tensor, 2, out=self.out.weight.data)
        else:
            super().load(name, tensor)


@pytest.mark.parametrize("kind", [Doubling, InPlace, OutOfPlace, Deriving, Moving])
def test_a_layer_that_its_loader_computes_stays_with_the_loader(
    kind: type[Model],
) -> None:
    model = kind()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1), rows(2)))
    forget(model)

    way = updates.load_model(source_of(version(2), rows(2)))

    fresh = kind()
    assert bytes_of(model) == loaded(fresh, source_of(version(2)))
    assert getattr(model, "absorbed", torch.zeros(1)).equal(
        getattr(fresh, "absorbed", torch.zeros(1))
    )
    assert loader.loaded == [None, [model.out]]
    assert loader.names == [["out"]]
    assert "the engine's loader for 1 layers (out: " in way


def test_copies_in_another_order_are_made_from_the_whole_tensor() -> None:
    model = Flattening()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1), rows(3)))
    forget(model)

    source = source_of(version(2), rows(3))
    updates.load_model(source)

    assert bytes_of(model) == loaded(Flattening(), source_of(version(2)))
    assert loader.loaded == [None]
    assert source.whole_names == ["out"]


def test_copies_of_whole_tensors_are_made_beside_prepared_ones() -> None:
    model = Flattening()
    updates, _ = planned(model)
    source = source_of(version(1), rows(3))
    source.memory = Memory()
    for _ in range(3):
        forget(model)
        updates.load_model(source)

    assert bytes_of(model) == loaded(Flattening(), source_of(version(1)))


class Untied(Model):
    """Has a head of its own, with which its loader computes, though the trainer ties it."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.zeros_like(self.embedding.weight), False)

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "head":
            self.head.weight.data.zero_()
            self.head.weight.data[:VOCAB].copy_(tensor + 1)
        else:
            super().load(name, tensor)


def test_a_loader_gets_a_tensor_under_all_of_its_names() -> None:
    model = Untied()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1)))
    forget(model)

    updates.load_model(source_of(version(2)))

    assert bytes_of(model) == loaded(Untied(), source_of(version(2)))
    assert loader.loaded == [None, [model.head]]
    assert loader.names == [["embedding", "head"]]


class Hiding(Model):
    """Writes where no operation of torch is seen."""

    quant_config = "any, so that nothing is missed in the recording"

    def load(self, name: str, tensor: Tensor) -> None:
        if name == "norm":
            self.norm.weight.data.numpy()[:] = tensor.float().numpy()
        else:
            super().load(name, tensor)


def test_a_parameter_that_nothing_was_seen_to_write_leaves_the_model_to_the_loader() -> None:
    model = Hiding()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1)))

    updates.load_model(source_of(version(2)))

    assert bytes_of(model) == loaded(Hiding(), source_of(version(2)))
    assert loader.loaded == [None, None]


class Deciding(Model):
    def load(self, name: str, tensor: Tensor) -> None:
        if name == "bias":
            self.bias.weight.data.fill_(tensor.item())
        else:
            super().load(name, tensor)


class Overlapping(Model):
    """The last of two tensors wins, of which the first is as good as any."""

    def load(self, name: str, tensor: Tensor) -> None:
        if name in ("q", "k"):
            self.qkv.weight.data[:KV_HEADS].copy_(tensor[:KV_HEADS])
            self.qkv.weight.data[KV_HEADS - 1 :].fill_(0)
        super().load(name, tensor)


def test_a_loader_that_looks_at_values_is_not_replayed() -> None:
    model = Deciding()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1)))

    updates.load_model(source_of(version(2)))

    assert bytes_of(model) == loaded(Deciding(), source_of(version(2)))
    assert loader.loaded == [None, None]


def test_a_layer_written_twice_stays_with_the_loader() -> None:
    model = Overlapping()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1)))

    updates.load_model(source_of(version(2)))

    assert bytes_of(model) == loaded(Overlapping(), source_of(version(2)))
    assert loader.loaded == [None, [model.qkv]]


class AfterLoading(NotingLoader):
    """Changes values where the recording does not look, as layerwise reload does."""

    def record(self, source: WeightSource) -> tuple[LoaderRecording, Mapping[nn.Module, str]]:
        recorded = super().record(source)
        self._change()
        return recorded

    def load(
        self, layers: Sequence[nn.Module] | None, tensors: Iterator[tuple[str, Tensor]]
    ) -> None:
        super().load(layers, tensors)
        self._change()

    def _change(self) -> None:
        halves = self._model.gate_up.weight.data.chunk(2)
        swapped = torch.cat([halves[1], halves[0]])
        self._model.gate_up.weight.data.copy_(swapped)


def test_values_that_change_after_loading_are_found_by_poisoning() -> None:
    model, twin = Model(), Model()
    loader, twin_loader = AfterLoading(model), AfterLoading(twin)
    updates = WorkerUpdates(model, loader)
    updates.load_model(source_of(version(1)))
    twin_loader.load(None, source_of(version(1)).tensors())
    assert bytes_of(model) == bytes_of(twin)  # the poison is gone
    forget(model)

    updates.load_model(source_of(version(2)))

    twin_loader.load(None, source_of(version(2)).tensors())
    assert bytes_of(model) == bytes_of(twin)
    assert loader.loaded == [None, [model.gate_up]]


def test_a_model_without_parameters_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="Identity, has no parameters"):
        WorkerUpdates(nn.Identity(), NotingLoader(Model()))


class Dropping(LoaderRecording):
    """A recording that misses one copy."""

    @property
    def copies(self) -> list[Any]:
        return super().copies[1:]


def test_a_recording_that_misses_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbra.engines.loading.loader_recording.LoaderRecording", Dropping)
    model = Model()
    updates, loader = planned(model)
    updates.load_model(source_of(version(1)))
    assert bytes_of(model) == loaded(Model(), source_of(version(1)))

    updates.load_model(source_of(version(2)))

    assert bytes_of(model)["qkv.weight"] == loaded(Model(), source_of(version(2)))["qkv.weight"]
    assert loader.loaded[1] is not None
