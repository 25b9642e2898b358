"""Workers that read an update into spare memory before they load it.

CPU storages stand in for a GPU's (`fake_ipc`); with a GPU, the copies have a stream of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ipc import FakeIpc, FakeOpener
from offered_exports import manifest_of, offered
from torch import Tensor, nn
from watched_loader import PlannedLoader

from umbra.engines.loading.copy_plan import StagedCopies
from umbra.engines.loading.weight_source import BlockCopy, Regions, WeightSource
from umbra.engines.loading.worker_updates import WorkerMemory, WorkerUpdates
from umbra.engines.shell.adapter_engine import ExportsUpdate
from umbra.runtime.errors import ConfigError, WeightSyncError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.weights.checksum import checksum_of
from umbra.runtime.weights.rank_exports import RankExports

HIDDEN, ROWS, PADDED_ROWS = 8, 10, 16
SHAPES: dict[str, tuple[int, ...]] = {
    "q": (12, HIDDEN),
    "k": (6, HIDDEN),
    "out": (HIDDEN, 12),
    "head": (ROWS, HIDDEN),
    "norm": (HIDDEN,),
}

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


class Model(nn.Module):
    """One worker's part: fused rows, columns, padding, and a parameter in float32."""

    def __init__(self, worker: int = 0, num_workers: int = 1) -> None:
        super().__init__()
        self._cut = worker, num_workers
        self.qk = self._make(18 // num_workers, HIDDEN)
        self.out = self._make(HIDDEN, 12 // num_workers)
        self.head = self._make(PADDED_ROWS, HIDDEN)
        self.norm = self._make(HIDDEN, dtype=torch.float32)

    def _make(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        worker, num_workers = self._cut
        for name, tensor in weights:
            match name:
                case "q" | "k":
                    size = len(tensor) // num_workers
                    start = 12 // num_workers if name == "k" else 0
                    mine = tensor.narrow(0, worker * size, size)
                    self.qk.data.narrow(0, start, size).copy_(mine)
                case "out":
                    size = 12 // num_workers
                    self.out.data.copy_(tensor.narrow(1, worker * size, size))
                case "head":
                    self.head.data[:ROWS].copy_(tensor)
                    self.head.data[ROWS:].fill_(0)
                case _:
                    self.norm.data.copy_(tensor)

    def content(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.named_parameters()}


class Ranks:
    """Three ranks hold float32, which travels as bfloat16."""

    def __init__(self, ipc: FakeIpc, device: str) -> None:
        self._parts: list[tuple[int, Tensor]] = []
        self._ipc = ipc
        tensors = {name: torch.randn(shape, device=device) for name, shape in SHAPES.items()}
        self.manifest = manifest_of({name: t.bfloat16() for name, t in tensors.items()})
        self.tensors = tensors
        self.exports = self._export()

    def _export(self) -> list[RankExports]:
        found: list[RankExports] = []
        for rank in range(3):
            own: list[tuple[int, Tensor]] = []
            for entry in self.manifest.entries:
                parts = self.tensors[entry.name].chunk(3)
                if rank < len(parts):
                    before = sum(part.numel() for part in parts[:rank])
                    own.append((entry.offset + 2 * before, parts[rank]))
            exported = self._ipc.export(own)
            assert isinstance(exported, RankExports)
            found.append(exported)
            self._parts += own
        return found

    def step(self) -> None:
        """Gives the tensors other values, in the memory that they have."""
        for tensor in self.tensors.values():
            tensor.normal_()

    def regions(self) -> Regions:
        """As the ranks send them."""
        return [
            [offset, 2 * part.numel(), checksum_of(part.bfloat16())]
            for offset, part in sorted(self._parts, key=lambda item: item[0])
        ]

    def loaded(self, worker: int = 0, num_workers: int = 1) -> dict[str, Tensor]:
        """What the loader alone makes of the tensors."""
        model = Model(worker, num_workers).to(self.tensors["norm"].device)
        model.load_weights((name, t.bfloat16()) for name, t in self.tensors.items())
        return model.content()


class Worker:
    def __init__(self, ipc: FakeIpc, device: str, *cut: int) -> None:
        self.model = Model(*cut).to(device)
        memory = WorkerMemory(lambda: FakeOpener(ipc))
        self.updates = WorkerUpdates(self.model, PlannedLoader(self.model), memory=memory)

    def sync(
        self,
        ranks: Ranks,
        folder: Path,
        *,
        is_staged: bool = True,
        between: Callable[[], object] = lambda: None,
    ) -> tuple[str, Regions]:
        """How it was loaded, and with which checksums. Before, the model loses its weights.

        Args:
            between: is called when the update is staged and not loaded yet.
        """

        def load(description: dict[str, Any]) -> tuple[str, Regions]:
            self.updates.open(description)
            if self.updates.staged is not None:
                self.updates.staged.wait()
            assert self.updates.is_staged
            for parameter in self.model.parameters():
                parameter.data.fill_(torch.nan)
            between()
            report = self.updates.load()
            return report["way"], report["regions"]

        with description_of(ranks, folder, is_staged=is_staged) as (description, runner):
            return runner.run(asyncio.to_thread(load, description))


@contextmanager
def description_of(
    ranks: Ranks, folder: Path, *, is_staged: bool = True
) -> Generator[tuple[dict[str, Any], asyncio.Runner]]:
    """Of a sync of what the ranks hold, whose memory a thread of the runner can open."""
    wire = [exports.to_wire() for exports in ranks.exports]
    with asyncio.Runner() as runner:
        offering = offered(folder, wire, ranks.manifest, is_staged=is_staged)
        buckets, _ = runner.run(offering.__aenter__())
        try:
            yield ExportsUpdate(ranks.manifest.to_wire(), buckets).description, runner
        finally:
            runner.run(offering.__aexit__(None, None, None))


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@on_each_device
@pytest.mark.parametrize("is_staged", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_versions_are_those_of_the_loader_bit_for_bit(
    ipc: FakeIpc, tmp_path: Path, num_workers: int, is_staged: bool, device: str
) -> None:
    ranks = Ranks(ipc, device)
    for worker in range(num_workers):
        engine = Worker(ipc, device, worker, num_workers)
        stages: list[StagedCopies | None] = []
        for version in range(5):  # a GPU makes the copies of the last two by a graph
            ranks.step()

            way, regions = engine.sync(ranks, tmp_path, is_staged=is_staged)

            assert_same(engine.model.content(), ranks.loaded(worker, num_workers))
            assert regions == ranks.regions()
            assert ("copies were staged" in way) == (is_staged and version > 0), way
            stages.append(engine.updates.staged)
        first, second, *later = stages
        assert first is None
        assert (second is not None) == is_staged
        assert all(each is second for each in later)
        engine.updates.close()
    assert ipc.num_open == 0


@on_each_device
def test_what_was_staged_is_loaded_and_checksums_tell_it_from_what_ranks_hold(
    ipc: FakeIpc, tmp_path: Path, device: str
) -> None:
    ranks, engine = Ranks(ipc, device), Worker(ipc, device)
    engine.sync(ranks, tmp_path)
    ranks.step()
    staged, sent = ranks.loaded(), ranks.regions()

    _, regions = engine.sync(ranks, tmp_path, between=ranks.step)

    assert_same(engine.model.content(), staged)
    later = ranks.regions()
    assert all(found != now for found, now in zip(regions, later, strict=True))
    assert any(found == was for found, was in zip(regions, sent, strict=True))
    engine.sync(ranks, tmp_path)
    assert_same(engine.model.content(), ranks.loaded())


def test_nothing_is_staged_that_no_plan_fits_or_that_is_not_to_be(
    ipc: FakeIpc, tmp_path: Path
) -> None:
    ranks, engine = Ranks(ipc, "cpu"), Worker(ipc, "cpu")
    engine.sync(ranks, tmp_path)
    way, _ = engine.sync(ranks, tmp_path, is_staged=False)
    assert engine.updates.staged is None
    assert "staged" not in way

    engine.model.qk.data = engine.model.qk.data.clone()
    way, _ = engine.sync(ranks, tmp_path)

    assert engine.updates.staged is None
    assert "recorded a load" in way
    assert_same(engine.model.content(), ranks.loaded())
    assert "copies were staged" in engine.sync(ranks, tmp_path)[0]


def test_a_plan_that_no_longer_fits_leaves_what_was_staged(ipc: FakeIpc, tmp_path: Path) -> None:
    ranks, engine = Ranks(ipc, "cpu"), Worker(ipc, "cpu")
    engine.sync(ranks, tmp_path)
    ranks.step()

    def move() -> None:
        assert engine.updates.staged is not None
        engine.model.qk.data = engine.model.qk.data.clone()

    way, regions = engine.sync(ranks, tmp_path, between=move)

    assert "recorded a load" in way
    assert_same(engine.model.content(), ranks.loaded())
    assert regions == ranks.regions()


def test_an_update_that_finds_no_spare_memory_is_loaded_without(
    ipc: FakeIpc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = torch.empty

    def refuse(nbytes: int, **options: Any) -> Tensor:
        if nbytes:
            raise torch.OutOfMemoryError
        return make(nbytes, **options)

    ranks, engine = Ranks(ipc, "cpu"), Worker(ipc, "cpu")
    engine.sync(ranks, tmp_path)
    ranks.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refuse)
        way, regions = engine.sync(ranks, tmp_path)

    assert "there was no memory to stage copies" in way
    assert_same(engine.model.content(), ranks.loaded())
    assert regions == ranks.regions()
    assert "copies were staged" in engine.sync(ranks, tmp_path)[0]


@on_each_device
def test_ranks_in_other_memory_are_staged_again(ipc: FakeIpc, tmp_path: Path, device: str) -> None:
    engine = Worker(ipc, device)
    engine.sync(Ranks(ipc, device), tmp_path)
    for _ in range(3):
        ranks = Ranks(ipc, device)
        for _ in range(2):
            way, regions = engine.sync(ranks, tmp_path)
            assert "copies were staged" in way
            assert_same(engine.model.content(), ranks.loaded())
            assert regions == ranks.regions()


def test_an_update_that_was_left_is_not_loaded(ipc: FakeIpc, tmp_path: Path) -> None:
    ranks, engine = Ranks(ipc, "cpu"), Worker(ipc, "cpu")
    engine.sync(ranks, tmp_path)
    with description_of(ranks, tmp_path) as (description, runner):
        runner.run(asyncio.to_thread(engine.updates.open, description))
        assert engine.updates.staged is not None

        engine.updates.close()

        assert engine.updates.is_staged
        with pytest.raises(WeightSyncError, match="no update was opened"):
            engine.updates.load()
    assert ipc.num_open == 0
    ranks.step()
    engine.sync(ranks, tmp_path)
    assert_same(engine.model.content(), ranks.loaded())


@pytest.mark.parametrize("way", ["close", "open", "load"])
def test_the_ranks_memory_is_left_when_nothing_reads_it_any_more(
    ipc: FakeIpc, tmp_path: Path, way: str
) -> None:
    done: list[str] = []

    class Staged(StagedCopies):
        def wait(self) -> None:
            done.append("waited")

    class Updates(WorkerUpdates):
        def _stage(self, source: WeightSource) -> StagedCopies:
            copy = BlockCopy(0, 0, torch.zeros(1), torch.zeros(1), None)
            return Staged([copy])

        def load_model(self, source: WeightSource) -> str:
            done.append("loaded")
            return ""

    class Opener(FakeOpener):
        def settle(self) -> None:
            done.append("left")

    def use(description: dict[str, Any]) -> None:
        updates.open(description)
        if way == "close":
            updates.close()
        elif way == "open":
            updates.open({**description, "is_staged": False})
        else:
            updates.load()

    ranks, model = Ranks(ipc, "cpu"), Model()
    memory = WorkerMemory(lambda: Opener(ipc))
    updates = Updates(model, PlannedLoader(model), memory=memory)
    with description_of(ranks, tmp_path) as (description, runner):
        runner.run(asyncio.to_thread(use, description))
        assert done == [*(["loaded"] if way == "load" else []), "waited", "left"]
        updates.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "hybrid"}, "set mode to 'standalone'"),
        ({"engine": "sglang"}, "engine 'sglang' reads weights when it is paused"),
        ({"transport": "memfd"}, "set transport to 'auto'"),
    ],
)
def test_a_pool_that_cannot_stage_updates_is_an_error(
    changes: dict[str, Any], problem: str
) -> None:
    settings: dict[str, Any] = {"mode": "standalone", "engine": "vllm", "staged_updates": True}
    PoolSpec(name="pool", count=2, **settings)
    with pytest.raises(ConfigError, match=f"pool 'pool': staged_updates .*{problem}"):
        PoolSpec(name="pool", count=2, **(settings | changes))
