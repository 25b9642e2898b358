"""Starts SGLang like the GPU tests and prints how long each step takes; no pytest.

    python -X faulthandler tests/gpu/engines/sglang_probe.py [--plain] [--model FOLDER] \
        2>&1 | tee log

What a scheduler writes comes in between. The last line is "probe: done"; a process that is killed
leaves its exit status (131: SIGQUIT, 137: SIGKILL, 139: SIGSEGV). SIGUSR1 to the process or one of
its schedulers shows where that is.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "shared/engines"))

from adapter_fixtures import MAX_CONTEXT_LEN
from adapter_runs import SharedEngine
from engine_runs import Collector, collect, run_async, running, wire_request
from model_factory import save_model
from sglang_runs import ENGINE_ARGS, running_core

from umbra.engines.sglang.sglang_engine import SglangCore
from umbra.engines.sglang.sglang_library import SglangLibrary

PLAIN = {**ENGINE_ARGS, "enable_deterministic_inference": False}


@contextmanager
def step(name: str) -> Generator[None]:
    print(f"probe: {name} ...", flush=True)
    started = time.perf_counter()
    yield
    print(f"probe: {name} took {time.perf_counter() - started:.1f} s", flush=True)


def go_through(core: SglangCore) -> None:
    async def body() -> None:
        engine = SharedEngine(
            core, None, max_num_seqs=256, max_context_len=MAX_CONTEXT_LEN, tick_ms=2.0
        )
        engine._gate.start_serving(0)  # pyright: ignore[reportPrivateUsage]
        async with running(engine):
            for turn in range(2):
                with step(f"128 requests of 128 tokens, turn {turn}"):
                    ids = [turn * 128 + i for i in range(128)]
                    await engine.submit(
                        [wire_request(i, [1, 2, 3], max_new_tokens=128) for i in ids]
                    )
                    await collect(engine, Collector(), len(ids))
            with step("pause, sleep(1), wake, resume"):
                await engine.pause("abort")
                await engine.sleep(1)
                await engine.wake(["weights", "kv_cache"])
                await engine.resume()
            with step("a request after it"):
                await engine.submit([wire_request(999, [1, 2, 3])])
                await collect(engine, Collector(), 1)

    run_async(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="without deterministic inference")
    parser.add_argument("--model", type=Path, help="default: the tests' small one")
    asked = parser.parse_args()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(60, repeat=True)
    logging.basicConfig(level="INFO", stream=sys.stderr)
    with step("import"):
        print(f"probe: SGLang {SglangLibrary.load().version}")
    with tempfile.TemporaryDirectory() as folder:
        if asked.model is None:
            save_model(Path(folder), "qwen3-wide")
        print("probe: start, first tokens included ...", flush=True)
        started = time.perf_counter()
        with running_core(
            asked.model or Path(folder),
            kv_cache_num_tokens=1 << 17,
            engine_args=PLAIN if asked.plain else ENGINE_ARGS,
        ) as core:
            print(f"probe: start took {time.perf_counter() - started:.1f} s", flush=True)
            go_through(core)
    print("probe: done", flush=True)


if __name__ == "__main__":
    main()
