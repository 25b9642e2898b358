from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from umbra.engines.loading.weight_source import BlockCopy

_NUM_BRANCHES: Final = 4
# For the 399 copies of an 8B on an H100, one branch takes 12.1 ms, 2 take 11.5 and 3 or 4 11.4.


class RepeatedCopies:
    """The copies of a plan, carried out once for each version in the same memory.

        first version        copy after copy
        second, and later    a CUDA graph of all copies, in parallel branches, on one GPU

    In the graph a copy begins while another branch's ends, and the CPU launches all of them at
    once. Copies from host memory are made one after the other: each waits for its part. Targets
    must be disjoint, and both sides' memory must stay in place. One thread.
    """

    def __init__(self, copies: Sequence[BlockCopy]) -> None:
        self.copies = copies
        devices = {tensor.device for copy in copies for tensor in (copy.values, copy.target)}
        # A graph has one GPU's copies: another's would be made only once, while it is recorded.
        self._is_on_one_gpu = [device.type for device in devices] == ["cuda"]
        self._was_carried_out = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def carry_out(self, wait: Callable[[int], None] | None = None) -> None:
        """Makes all copies; on a GPU they may still be in progress afterwards. `wait` returns when
        the blocks of an entry may be read."""
        if not (self._is_on_one_gpu and self._was_carried_out):
            for copy in self.copies:
                if wait is not None:
                    wait(copy.idx)
                copy.carry_out()
            self._was_carried_out = True
            return
        if wait is not None:
            for copy in self.copies:
                wait(copy.idx)
        if self._graph is None:
            self._graph = _graph_of(self.copies)
        self._graph.replay()


def _graph_of(copies: Sequence[BlockCopy]) -> torch.cuda.CUDAGraph:
    """Records copies without carrying them out. Other threads may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    device = copies[0].target.device
    first, *others = (torch.cuda.Stream(device) for _ in range(_NUM_BRANCHES))
    with torch.cuda.stream(first):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for stream in others:
                stream.wait_stream(first)
            try:
                for branch, stream in enumerate((first, *others)):
                    with torch.cuda.stream(stream):
                        for copy in copies[branch::_NUM_BRANCHES]:
                            copy.carry_out()
            finally:  # the end of a capture with open branches would replace the copies' error
                for stream in others:
                    first.wait_stream(stream)
        finally:
            graph.capture_end()
    return graph
