"""The checksums of an engine's workers are those of the parameters that copies have filled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from fake_ipc import FakeIpc, FakeOpener
from offered_exports import manifest_of, offered
from torch import Tensor, nn
from watched_loader import PlannedLoader

from umbra.engines.loading.weight_source import BlockCopy, Regions, WeightSource
from umbra.engines.loading.worker_updates import WorkerMemory, WorkerUpdates
from umbra.engines.shell.adapter_engine import ExportsUpdate
from umbra.runtime.weights.checksum import checksum_of
from umbra.runtime.weights.rank_exports import RankExports

ROWS_OF_RANK_0 = 7
T = TypeVar("T")

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


class Ranks:
    """Two ranks hold float32, which travels as bfloat16; the first has 7 rows of each tensor."""

    def __init__(self, ipc: FakeIpc, device: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.device = torch.device(device)
        self.tensors = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
        self.manifest = manifest_of({name: t.bfloat16() for name, t in self.tensors.items()})
        self._ipc = ipc

    def export(self) -> list[RankExports]:
        found: list[RankExports] = []
        for is_first in (True, False):
            own = [(offset, part) for offset, part in self._parts(is_first) if part.numel()]
            exported = self._ipc.export(own)
            assert isinstance(exported, RankExports)
            found.append(exported)
        return found

    def regions(self) -> Regions:
        """As the ranks send them."""
        parts = [*self._parts(True), *self._parts(False)]
        return [
            [offset, 2 * part.numel(), checksum_of(part.bfloat16())]
            for offset, part in sorted(parts, key=lambda item: item[0])
            if part.numel()
        ]

    def _parts(self, is_first: bool) -> Iterator[tuple[int, Tensor]]:
        for entry in self.manifest.entries:
            tensor = self.tensors[entry.name]
            if is_first:
                yield entry.offset, tensor[:ROWS_OF_RANK_0]
            else:
                start = 2 * tensor[:ROWS_OF_RANK_0].numel()
                yield entry.offset + start, tensor[ROWS_OF_RANK_0:]


def read(ranks: Ranks, ipc: FakeIpc, folder: Path, use: Callable[[WeightSource], T]) -> T:
    """What `use` returns of the source of one sync with checksums."""

    def in_worker(description: dict[str, Any]) -> T:
        memory = WorkerMemory(lambda: FakeOpener(ipc))
        with memory.reading(description, ranks.device) as source:
            return use(source)

    async def body() -> T:
        wire = [exports.to_wire() for exports in ranks.export()]
        async with offered(folder, wire, ranks.manifest) as (buckets, _):
            description = ExportsUpdate(ranks.manifest.to_wire(), buckets).description
            return await asyncio.to_thread(in_worker, description)

    return asyncio.run(body())


def copies_of(source: WeightSource, parameters: Mapping[str, Tensor]) -> list[BlockCopy]:
    """A whole block into rows of a fused parameter; columns of another one; one block twice, once
    as a float32 that was bfloat16 on its way."""
    a, b = (source.block(0, number) for number in (0, 1))
    bias = source.block(1, 0)
    wire = torch.bfloat16
    return [
        BlockCopy(0, 0, a, parameters["fused"][4:11], None),
        BlockCopy(0, 1, b[:, 1:3], parameters["columns"], None),
        BlockCopy(1, 0, bias, parameters["bias"], None),
        BlockCopy(1, 0, bias, parameters["float32"], wire),
    ]


REGION_OF = {"fused": 0, "columns": 1, "bias": 2, "float32": 2}


@on_each_device
@pytest.mark.parametrize("wrong", [None, *REGION_OF])
def test_one_wrong_bit_of_a_parameter_is_found(
    ipc: FakeIpc, tmp_path: Path, wrong: str | None, device: str
) -> None:
    ranks = Ranks(ipc, device, {"a": (10, 4), "bias": (5,)})
    parameters = {
        "fused": torch.zeros(20, 4, dtype=torch.bfloat16, device=device),
        "columns": torch.zeros(3, 2, dtype=torch.bfloat16, device=device),
        "bias": torch.zeros(5, dtype=torch.bfloat16, device=device),
        "float32": torch.zeros(5, device=device),
    }

    def use(source: WeightSource) -> Regions:
        copies = copies_of(source, parameters)
        with source.reading(copies):
            for copy in copies:
                copy.carry_out()
            if wrong is not None:
                content = parameters[wrong].view(-1).view(torch.uint8)
                content[len(content) // 2] ^= 1
        return source.regions

    found, sent = read(ranks, ipc, tmp_path, use), ranks.regions()

    differing = [idx for idx, region in enumerate(sent) if found[idx] != region]
    assert differing == ([] if wrong is None else [REGION_OF[wrong]])


class Model(nn.Module):
    """One worker's part: rows of a fused parameter, columns, and a tensor that all have, twice."""

    def __init__(self, worker: int, num_workers: int) -> None:
        super().__init__()
        self._cut = worker, num_workers
        self.fused = self._make(2 * 12 // num_workers, 8)
        self.columns = self._make(8, 12 // num_workers)
        self.norm = self._make(9)
        self.norm_again = nn.Parameter(torch.zeros(9), requires_grad=False)

    def _make(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        worker, num_workers = self._cut
        size = 12 // num_workers
        for name, tensor in weights:
            if name in ("q", "k"):
                mine = tensor.narrow(0, worker * size, size)
                self.fused.data.narrow(0, size * (name == "k"), size).copy_(mine)
            elif name == "columns":
                self.columns.data.copy_(tensor.narrow(1, worker * size, size))
            else:
                self.norm.data.copy_(tensor)
                self.norm_again.data.copy_(tensor)


@on_each_device
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("is_inference", [False, True])
def test_a_replay_has_the_checksums_of_the_ranks(
    ipc: FakeIpc, tmp_path: Path, num_workers: int, is_inference: bool, device: str
) -> None:
    ranks = Ranks(ipc, device, {"q": (12, 8), "k": (12, 8), "columns": (8, 12), "norm": (9,)})
    workers = [
        WorkerUpdates(model, PlannedLoader(model))
        for model in (Model(worker, num_workers).to(device) for worker in range(num_workers))
    ]
    for _ in range(3):
        for tensor in ranks.tensors.values():
            tensor.normal_()
        for updates in workers:

            def use(source: WeightSource, updates: WorkerUpdates = updates) -> Regions:
                with torch.inference_mode(is_inference):
                    updates.load_model(source)
                    return source.regions

            assert read(ranks, ipc, tmp_path, use) == ranks.regions()
        assert all(updates.plan is not None and updates.plan.num_copies for updates in workers)
