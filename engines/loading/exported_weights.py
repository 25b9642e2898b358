from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from umbra.engines.loading.weight_source import BlockCopy, Regions, wanted_names
from umbra.runtime.weights.byte_views import flatten
from umbra.runtime.weights.checksum import CastValues, numbers_on, sum_all, to_checksums
from umbra.runtime.weights.copy_planner import ShardBlock
from umbra.runtime.weights.exports.exported_image import ExportedImage
from umbra.runtime.weights.image.sync_progress import EngineEnd

_MOST_HELD_NBYTES: Final = 256 << 20
# Copies of parameters in other dtypes that checksums hold at a time. Less means more launches;
# without a limit, an engine that holds float16 would need the memory of another model.


class ExportedWeights:
    def __init__(
        self, image: ExportedImage, end: EngineEnd, device: torch.device, *, has_checksums: bool
    ) -> None:
        self.manifest = image.manifest
        self._image = image
        self._end = end
        self._num_entries = len(image.manifest.entries)
        self._device = device
        counts = [len(image.regions(idx)) for idx in range(self._num_entries)]
        self._first_regions = [0, *accumulate(counts)]  # by entry
        self._has_checksums = has_checksums
        self._summed: set[int] = set()  # entries
        self._sums = torch.zeros(sum(counts), dtype=torch.int64, device=device)

    @property
    def memory(self) -> ExportedImage:
        return self._image

    @property
    def regions(self) -> Regions:
        """Checksums of parameters where copies of blocks filled them, else of the values read."""
        if not self._has_checksums:
            return []
        found = [region for idx in range(self._num_entries) for region in self._image.regions(idx)]
        checksums = to_checksums(self._sums)
        return [[*region, each] for region, each in zip(found, checksums, strict=True)]

    def tensors(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Reports the progress of each entry the first time that it is taken."""
        wanted = wanted_names(self.manifest, names)
        for idx in range(self._num_entries):
            self._end.check_not_aborted()
            self._end.wait_filled(idx + 1)
            if wanted[idx]:
                tensor = self.whole(idx)
                for name in wanted[idx]:
                    yield name, tensor
            if self._end.num_loaded == idx:
                self._end.set_loaded(idx + 1)

    def wait(self, idx: int) -> None:
        """Returns at once: `reading` has waited for everything."""

    @contextmanager
    def reading(self, copies: Sequence[BlockCopy]) -> Generator[None]:
        self._end.wait_filled(self._num_entries)
        yield
        if self._has_checksums:
            self._sum_kept(copies)
        self._end.check_not_aborted()
        self._end.set_loaded(self._num_entries)

    def blocks(self, idx: int) -> list[ShardBlock]:
        return self._image.blocks(idx)

    def block(self, idx: int, number: int) -> Tensor:
        return self._image.part(idx, number)

    def whole(self, idx: int) -> Tensor:
        tensor = self._image.assemble(idx, self._device)
        if self._has_checksums and idx not in self._summed:
            self._summed.add(idx)
            start, data = self.manifest.entries[idx].offset, flatten(tensor).view(torch.uint8)
            self._add_up(
                [
                    _Term(region, CastValues(data[offset - start :][:nbytes], torch.uint8))
                    for region, (offset, nbytes) in enumerate(
                        self._image.regions(idx), self._first_regions[idx]
                    )
                ]
            )
        return tensor

    def _sum_kept(self, copies: Sequence[BlockCopy]) -> None:
        """Takes the checksum of each region from the parameter that got all of it in one copy.
        Other regions start from the rank's own sum, plus the differences of the parameters that got
        a part of it, which are zero if all is well."""
        by_block: dict[tuple[int, int], list[BlockCopy]] = {}
        for copy in copies:
            by_block.setdefault((copy.idx, copy.number), []).append(copy)
        terms: list[_Term] = []
        held_nbytes = 0
        for idx, first in enumerate(self._first_regions[:-1]):
            on_wire = self._dtype_on_wire(idx)
            for number in range(len(self._image.regions(idx))):
                region, made = first + number, by_block.get((idx, number), [])
                if idx not in self._summed:
                    part = self._image.part(idx, number)
                    whole = next((copy for copy in made if _is_whole(copy, part, on_wire)), None)
                    kept = part if whole is None else whole.target
                    terms.append(_Term(region, CastValues(kept, on_wire)))
                    made = [copy for copy in made if copy is not whole]
                for copy in made:
                    terms.append(_Term(region, CastValues(copy.target, copy.target.dtype)))
                    terms.append(_Term(region, copy.expected(), sign=-1))
                    if copy.on_wire is not None:  # what is expected is a copy
                        held_nbytes += terms[-1].content.values.nbytes
            if held_nbytes > _MOST_HELD_NBYTES:
                self._add_up(terms)
                terms, held_nbytes = [], 0
        self._summed.update(range(self._num_entries))
        self._add_up(terms)

    @torch.inference_mode()
    def _add_up(self, terms: Sequence[_Term]) -> None:
        """Adds the terms to their regions' checksums, on the GPU."""
        if terms:
            device = self._sums.device
            contents = [term.content for term in terms]
            sums = sum_all([CastValues(each.values.to(device), each.dtype) for each in contents])
            signs = numbers_on(sums.device, [term.sign for term in terms])
            regions = numbers_on(sums.device, [term.region for term in terms])
            self._sums.index_add_(0, regions, sums * signs)

    def _dtype_on_wire(self, idx: int) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.manifest.entries[idx].dtype)
        return dtype


class _Term(NamedTuple):
    region: int
    content: CastValues
    sign: int = 1


def _is_whole(copy: BlockCopy, part: Tensor, on_wire: torch.dtype) -> bool:
    """Whether the target has all bytes of a rank's part, in the order in which they travel."""
    return (
        copy.target.dtype == on_wire
        and copy.values.numel() == part.numel()
        and copy.values.is_contiguous()
        and part.is_contiguous()
    )
