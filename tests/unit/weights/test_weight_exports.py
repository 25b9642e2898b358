"""What ranks offer of their own memory, on the wire, and what engines and their workers read of it.

CPU storages stand in for a GPU's (`fake_ipc`); whole syncs are in test_exported_weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from fake_ipc import FakeIpc, FakeOpener
from local_world import empty_like
from offered_exports import export_rows, manifest_of, offered
from torch import Tensor

from umbra.engines.embedded.weight_receiver import WeightReceiver
from umbra.engines.loading.weight_source import Regions
from umbra.engines.loading.worker_updates import WorkerMemory
from umbra.engines.shell.adapter_engine import ExportsUpdate
from umbra.runtime.errors import ProtocolError, WeightSyncError
from umbra.runtime.weights.exports.exported_image import ExportedImage, OpenedMemory
from umbra.runtime.weights.rank_exports import ChunksHandle, RankExports


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shards_of_several_ranks_make_up_whole_tensors(ipc: FakeIpc, num_ranks: int) -> None:
    tensors = {"a": torch.randn(10, 3), "b": torch.randn(1, 4), "c": torch.arange(5)}
    wire = [exports.to_wire() for exports in export_rows(ipc, tensors, num_ranks)]

    image = ExportedImage(manifest_of(tensors), wire, FakeOpener(ipc))

    for idx, tensor in enumerate(tensors.values()):
        assert torch.equal(image.assemble(idx, torch.device("cpu")), tensor)


def test_an_image_is_the_same_object_while_the_memory_is_the_same(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(10, 3), "b": torch.randn(1, 4)}
    manifest = manifest_of(tensors).to_wire()
    first, second = (
        [exports.to_wire() for exports in export_rows(ipc, tensors, 2)] for _ in range(2)
    )
    memory = OpenedMemory(lambda: FakeOpener(ipc))

    image = memory.image(manifest, first)
    image.assemble(0, torch.device("cpu"))
    memory.leave()
    again = memory.image(bytes(bytearray(manifest)), [bytes(bytearray(each)) for each in first])
    other = memory.image(manifest, second)
    num_open = ipc.num_open
    memory.close()

    assert again is image
    assert other is not image
    assert num_open == 0  # nothing of the second was read
    assert memory.image(manifest, second) is not other


def without_a_part(exports: list[RankExports]) -> None:
    exports[1] = RankExports(exports[1].allocations, exports[1].parts[1:])


def twice_the_same(exports: list[RankExports]) -> None:
    exports[1] = exports[0]


def beyond_the_end(exports: list[RankExports]) -> None:
    last = exports[1].parts[-1]
    exports[1] = replace(exports[1], parts=(*exports[1].parts[:-1], replace(last, offset=1 << 20)))


def cut_in_two_ways(exports: list[RankExports]) -> None:
    parts = exports[0].parts
    rows = replace(parts[0], shape=(2, 3))
    exports[0] = replace(exports[0], parts=(*parts, rows))


@pytest.mark.parametrize(
    "damage", [without_a_part, twice_the_same, beyond_the_end, cut_in_two_ways]
)
def test_exports_that_are_not_the_whole_model_are_refused(
    ipc: FakeIpc, damage: Callable[[list[RankExports]], None]
) -> None:
    tensors = {"a": torch.randn(10, 3), "b": torch.randn(4, 4)}
    exports = export_rows(ipc, tensors, 2)
    damage(exports)

    with pytest.raises(WeightSyncError, match="do not cover tensor"):
        ExportedImage(manifest_of(tensors), [e.to_wire() for e in exports], FakeOpener(ipc))


def test_a_part_of_no_tensor_is_refused(ipc: FakeIpc) -> None:
    exports = export_rows(ipc, {"a": torch.randn(10, 3)}, 1)

    with pytest.raises(ProtocolError, match="a part at image byte 0 belongs to no tensor"):
        ExportedImage(
            manifest_of({"a": torch.zeros(0)}), [e.to_wire() for e in exports], FakeOpener(ipc)
        )


def test_exports_that_were_read_are_not_read_again(ipc: FakeIpc) -> None:
    offer = ipc.export([(0, torch.randn(6, 2))])
    assert isinstance(offer, RankExports)
    for exports in (offer, replace(offer, keeps_memory=False)):
        packed = exports.to_wire()

        read = RankExports.from_wire(packed)

        assert read == exports
        assert RankExports.from_wire(bytes(bytearray(packed))) is read


@pytest.mark.parametrize(
    ("what", "idx", "value"),
    [
        ("allocations", 0, b"short"),
        ("allocations", 1, b"short"),
        ("allocations", 1, "x" * 64),
        ("allocations", 2, 0),
        ("allocations", 2, 1 << 60),
        ("allocations", 3, -1),
        ("allocations", 3, 1.5),
        ("parts", 0, -1),
        ("parts", 1, 1),
        ("parts", 2, 2),
        ("parts", 2, 4),
        ("parts", 3, "float33"),
        ("parts", 4, [7, 2]),
        ("parts", 4, [0, 2]),
        ("parts", 4, [6]),
        ("parts", 4, [6, True]),
        ("parts", 5, [-2, 1]),
        ("parts", 5, [1 << 40, 1]),
    ],
)
def test_malformed_exports_are_refused_on_the_wire(
    ipc: FakeIpc, what: str, idx: int, value: object
) -> None:
    offer = ipc.export([(0, torch.randn(6, 2))])
    assert isinstance(offer, RankExports)
    wire = msgpack.unpackb(offer.to_wire())
    wire[("allocations", "parts").index(what)][0][idx] = value

    with pytest.raises(ProtocolError):
        RankExports.from_wire(msgpack.packb(wire))


SEGMENT = ChunksHandle("/tmp/umbra-0/job-node/fds", "ab12", 3)


def with_segment(offer: RankExports, segment: object) -> bytes:
    """The wire form of exports whose allocation consists of chunks."""
    wire = msgpack.unpackb(offer.to_wire())
    wire[0][0][1] = segment
    return msgpack.packb(wire)


def test_exports_of_a_segments_chunks_are_the_same_on_the_other_side(ipc: FakeIpc) -> None:
    offer = ipc.export([(0, torch.randn(6, 2))])
    assert isinstance(offer, RankExports)
    chunks = replace(offer.allocations[0], handle=SEGMENT)

    read = RankExports.from_wire(with_segment(offer, SEGMENT.to_wire()))

    assert read == replace(offer, allocations=(chunks,))


@pytest.mark.parametrize(
    "segment",
    [
        [],
        ["", "ab12", 3],
        ["/tmp/fds\0", "ab12", 3],
        ["/" + "x" * 107, "ab12", 3],
        [b"/tmp/fds", "ab12", 3],
        ["/tmp/fds", "", 3],
        ["/tmp/fds", "a b", 3],
        ["/tmp/fds", "a" * 65, 3],
        ["/tmp/fds", "ab12", 0],
        ["/tmp/fds", "ab12", -3],
        ["/tmp/fds", "ab12", 5],  # of 48 bytes
        ["/tmp/fds", "ab12", 1 << 60],
        ["/tmp/fds", "ab12", True],
        ["/tmp/fds", "ab12", 3, 3],
    ],
)
def test_malformed_handles_of_chunks_are_refused_on_the_wire(
    ipc: FakeIpc, segment: list[object]
) -> None:
    offer = ipc.export([(0, torch.randn(6, 2))])
    assert isinstance(offer, RankExports)

    with pytest.raises(ProtocolError, match="handle of"):
        RankExports.from_wire(with_segment(offer, segment))


@pytest.mark.parametrize(
    "raw",
    [
        *({}, [], 3, "it has no GPU"),
        *(b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x93\x90\x90\x01", b"\x93\x90\x90\xc3\xc3"),
    ],
)
def test_undecodable_exports_are_refused(raw: object) -> None:
    with pytest.raises(ProtocolError):
        RankExports.from_wire(raw)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_of_several_ranks_go_straight_into_parameters(
    ipc: FakeIpc, tmp_path: Path, num_ranks: int
) -> None:
    tensors = {"a": torch.randn(10, 3), "b": torch.randn(1, 4), "strided": torch.randn(7, 2)}
    manifest = manifest_of(tensors)
    wire = [exports.to_wire() for exports in export_rows(ipc, tensors, num_ranks)]
    parameters = empty_like(tensors) | {"strided": torch.zeros(2, 7).t()}
    receiver = WeightReceiver(parameters, make_opener=lambda: FakeOpener(ipc))

    async def receive() -> int:
        async with offered(tmp_path, wire, manifest) as (buckets, _):
            await asyncio.to_thread(receiver.begin, manifest.to_wire(), buckets)
            nbytes = await asyncio.to_thread(receiver.load)
            for name, tensor in tensors.items():  # before anything is verified
                assert torch.equal(parameters[name], tensor), name
            receiver.close()
            return nbytes

    assert asyncio.run(receive()) == 4 * (30 + 4 + 14)
    assert ipc.num_open == 0


def test_a_worker_gets_whole_tensors_under_every_name_and_reports_them(
    ipc: FakeIpc, tmp_path: Path
) -> None:
    tensors = {"a": torch.randn(10, 3), "b": torch.randn(4)}
    manifest = replace(manifest_of(tensors), aliases={"head": "a"})
    wire = [exports.to_wire() for exports in export_rows(ipc, tensors, 2)]

    async def read() -> tuple[dict[str, Tensor], Regions, int]:
        async with offered(tmp_path, wire, manifest) as (buckets, progress):
            description = ExportsUpdate(manifest.to_wire(), buckets).description
            found = await asyncio.to_thread(read_all, description)
            return *found, progress.num_loaded(0)

    def read_all(description: dict[str, Any]) -> tuple[dict[str, Tensor], Regions]:
        cpu = torch.device("cpu")
        with memory.reading(description, cpu) as source:
            return dict(source.tensors()), source.regions

    memory = WorkerMemory(lambda: FakeOpener(ipc))
    found, regions, num_loaded = asyncio.run(read())

    assert list(found) == ["a", "head", "b"]
    assert torch.equal(found["head"], tensors["a"])
    assert torch.equal(found["b"], tensors["b"])
    assert [region[:2] for region in regions] == [[0, 60], [60, 60], [256, 8], [264, 8]]
    assert num_loaded == 2
    memory.close()
    assert ipc.num_open == 0
    update = ExportsUpdate(manifest.to_wire(), import_of(wire))
    assert update.take_reports([regions, regions]) == 136
    assert update.verify(regions) == []


def test_blocks_are_read_without_assembling_tensors_and_have_the_same_checksums(
    ipc: FakeIpc, tmp_path: Path
) -> None:
    masters = {"a": torch.randn(10, 3), "b": torch.randn(4), "c": torch.randn(())}
    manifest = manifest_of({name: tensor.bfloat16() for name, tensor in masters.items()})
    parts = {0: [(0, masters["a"][:7]), (512, masters["c"])], 1: [(42, masters["a"][7:])]}
    parts[1].append((256, masters["b"]))
    exported = [ipc.export(found) for found in parts.values()]
    wire = [exports.to_wire() for exports in exported if isinstance(exports, RankExports)]

    def read_all(description: dict[str, Any], *, by_blocks: bool) -> tuple[Any, ...]:
        cpu = torch.device("cpu")
        with memory.reading(description, cpu) as source:
            if not by_blocks:
                return dict(source.tensors()), source.regions
            with source.reading(()):
                found = {
                    entry.name: [
                        (block.starts, source.block(idx, number).clone())
                        for number, block in enumerate(source.blocks(idx))
                    ]
                    for idx, entry in enumerate(manifest.entries)
                }
            again = list(source.tensors({"b"}))  # what a loader needs besides
            return found, source.regions, again

    async def read(*, by_blocks: bool) -> tuple[Any, ...]:
        async with offered(tmp_path, wire, manifest) as (buckets, progress):
            description = ExportsUpdate(manifest.to_wire(), buckets).description
            found = await asyncio.to_thread(read_all, description, by_blocks=by_blocks)
            assert progress.num_loaded(0) == 3
            return found

    memory = WorkerMemory(lambda: FakeOpener(ipc))
    blocks, regions, again = asyncio.run(read(by_blocks=True))
    tensors, regions_of_tensors = asyncio.run(read(by_blocks=False))

    assert [starts for starts, _ in blocks["a"]] == [(0, 0), (7, 0)]
    assert torch.equal(torch.cat([part for _, part in blocks["a"]]), masters["a"])
    assert torch.equal(blocks["c"][0][1], masters["c"])
    assert torch.equal(tensors["a"], masters["a"].bfloat16())
    assert [name for name, _ in again] == ["b"]
    assert regions == regions_of_tensors
    assert all(checksum is not None for _, _, checksum in regions)
    assert len(ipc.opened) == ipc.num_open == 3


def test_rows_in_another_shape_are_no_blocks(ipc: FakeIpc) -> None:
    tensors = {"a": torch.randn(10, 3)}
    flat = ipc.export([(0, tensors["a"].reshape(-1))])
    assert isinstance(flat, RankExports)

    image = ExportedImage(manifest_of(tensors), [flat.to_wire()], FakeOpener(ipc))

    assert image.blocks(0) == []
    assert torch.equal(image.assemble(0, torch.device("cpu")), tensors["a"])


def import_of(wire: Sequence[object]) -> dict[str, Any]:
    return {
        "exports": wire,
        "fd_socket": "",
        "progress": {},
        "has_checksums": True,
        "is_staged": False,
    }


def test_what_one_worker_read_wrongly_is_named() -> None:
    manifest = manifest_of({"a": torch.zeros(15), "b": torch.zeros(2)})
    update = ExportsUpdate(manifest.to_wire(), import_of([]))
    sent = [[0, 60, 11], [256, 8, 12]]

    assert update.take_reports([[[0, 60, 11], [256, 8, 12]], [[0, 60, 99]]]) == 68
    mismatches = update.verify(sent)

    assert len(mismatches) == 2
    assert "worker 1, 60 image bytes from 0: sent with checksum 11, arrived with 99" in mismatches
