from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from umbra.engines.loading.repeated_copies import RepeatedCopies
from umbra.engines.loading.weight_source import BlockCopy

_ALIGNMENT: Final = 256


class StagedCopies:
    """The copies of a plan in two halves: an engine generates during the first one.

        ranks' memory ──begin, on a stream of its own──▶ spare memory ──finish──▶ parameters
        begin ─▶ is_done, wait ─▶ finish      once for each version

    The first half casts and cuts, and uses the links between GPUs. The second stays within the
    engine's GPU. Owns the spare memory over all versions in the same memory; torch.OutOfMemoryError
    if there is none. The ranks' memory must stay until `wait` returns. One device, one thread.
    """

    @torch.inference_mode()
    def __init__(self, copies: Sequence[BlockCopy]) -> None:
        sizes = [-(-copy.target.nbytes // _ALIGNMENT) * _ALIGNMENT for copy in copies]
        bounds = list(accumulate(sizes, initial=0))
        self._device = copies[0].target.device
        memory = torch.empty(bounds[-1], dtype=torch.uint8, device=self._device)
        spare = [
            _viewed(memory[start:stop], copy.target)
            for copy, (start, stop) in zip(copies, pairwise(bounds), strict=True)
        ]
        pairs = list(zip(copies, spare, strict=True))
        self._to_spare = RepeatedCopies([copy._replace(target=each) for copy, each in pairs])
        self._to_targets = RepeatedCopies(
            [copy._replace(values=each, on_wire=None) for copy, each in pairs]
        )
        is_async = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_async else None
        self._done = torch.cuda.Event() if is_async else None

    @property
    def is_done(self) -> bool:
        return self._done is None or self._done.query()

    def wait(self) -> None:
        """Returns when the ranks' memory is no longer read. Idempotent."""
        if self._done is not None:
            self._done.synchronize()

    @torch.inference_mode()
    def begin(self) -> None:
        if self._stream is None or self._done is None:
            self._to_spare.carry_out()
            return
        # The last version may still be on its way from the spare memory to the parameters.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                self._to_spare.carry_out()
                self._done.record()
        except BaseException:
            self._stream.synchronize()
            raise

    @torch.inference_mode()
    def finish(self) -> None:
        """Copies the values to the targets; copies may still be in progress when it returns."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        self._to_targets.carry_out()


def _viewed(memory: Tensor, target: Tensor) -> Tensor:
    return memory[: target.nbytes].view(target.dtype).view(target.shape)
