"""One vLLM for all tests of a module: its start takes longer than all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_fixtures import MAX_CONTEXT_LEN
from engine_runs import shared_loop

from umbra.engines.vllm.vllm_engine import VllmCore
from umbra.engines.vllm.vllm_settings import VllmSettings

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here; `make test-vllm` installs it in .venv-vllm",
)
MAX_NUM_SEQS = 64


@contextmanager
def running_core(
    folder: Path, adapters: Mapping[str, Path] | None = None, **changes: Any
) -> Generator[VllmCore]:
    """A vLLM with the weights in `folder`, on the loop of every `run_async` meanwhile."""
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": MAX_NUM_SEQS,
        "max_context_len": MAX_CONTEXT_LEN,
        "kv_cache_num_tokens": None,
        "num_threads": 1,
        "load_weights": True,
        "engine_args": {},
        "lora_adapters": {name: str(path) for name, path in (adapters or {}).items()},
    }
    with shared_loop() as runner:
        core = VllmCore(VllmSettings(**(settings | changes)))
        try:
            runner.run(core.start())
            runner.run(core.sleep(1, ["weights", "kv_cache"]))  # starts a thread that vLLM keeps
            runner.run(core.wake(["weights", "kv_cache"]))
            yield core
        finally:
            runner.run(core.stop())
