"""One SGLang for all tests of a module: its start takes longer than most of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_fixtures import MAX_CONTEXT_LEN
from adapter_runs import SharedEngine
from engine_runs import Collector, collect, running, shared_loop, wire_request

from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.sglang.sglang_settings import SglangSettings

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None,
    reason="SGLang is not installed here; docs/engines.md says what it takes",
)

ENGINE_ARGS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    # Draws follow the seeds, and numbers do not depend on who else is in the batch.
    "enable_deterministic_inference": True,
}


@contextmanager
def running_core(folder: Path, **changes: Any) -> Generator[SglangCore]:
    """An SGLang with the weights in `folder`, on the loop of every `run_async` meanwhile."""
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "bfloat16",
        "device": "cuda",
        "max_num_seqs": 256,
        "max_context_len": MAX_CONTEXT_LEN,
        "kv_cache_num_tokens": None,
        "num_threads": 1,
        "load_weights": True,
        "engine_args": ENGINE_ARGS,
    }
    # Triton's kernels need nothing to be compiled by nvcc, for which there may not be one.
    os.environ["SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM"] = "0"
    # No compile workers that start when some test first needs a kernel.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with shared_loop() as runner:
        core = SglangCore(SglangSettings(**(settings | changes)))
        try:
            runner.run(core.start())
            runner.run(_warm_up(core))
            yield core
        finally:
            runner.run(core.stop())


async def _warm_up(core: SglangCore) -> None:
    """Kernels are compiled when they are first used, which takes longer than a test may."""
    engine = SharedEngine(
        core, None, max_num_seqs=256, max_context_len=MAX_CONTEXT_LEN, tick_ms=2.0
    )
    engine._gate.start_serving(0)  # pyright: ignore[reportPrivateUsage]
    async with running(engine):
        for temperature in (0.0, 1.0):
            asked = [wire_request(i, [1, 2, 3], temperature=temperature) for i in range(4)]
            await engine.submit(asked)
            await collect(engine, Collector(), len(asked))
