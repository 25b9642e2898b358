"""Requirements on every engine on a GPU besides the protocol: logprobs, updates, memory.

A module imports the tests and gives `make_engine`, and `reference`, a fixture that makes the same
model from a seed, and what logprobs may differ from its own by. It may replace `rank_variables`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance_runs import MakeEngine, requests, results_of, weights
from engine_runs import Completion, on_the_engines_loop, run_async, running
from ipc_pool import EngineInPool, pool_of, rank_processes
from local_sync import publish
from torch import Tensor
from transformers import PreTrainedModel

from umbra.engines.shell import adapter_engine
from umbra.runtime.pools.sync_coordinator import SyncCoordinator


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The model under test as transformers has it.

    Attributes:
        make: from a seed, on the CPU.
        atol: of a single logprob.
    """

    make: Callable[[int], PreTrainedModel]
    atol: float

    def errors(
        self, asked: dict[str, Any], completion: Completion, seed: int, temperature: float
    ) -> Tensor:
        """Differences [T] between a completion's logprobs and those of the model."""
        prompt = asked["tokens"].tolist()
        with torch.inference_mode():
            logits = self.make(seed)(torch.tensor([prompt + completion.tokens])).logits[0].float()
        expected = torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), -1)
        chosen = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        return (torch.tensor(completion.logprobs) - chosen).abs()


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@on_the_engines_loop
async def test_logprobs_are_those_of_transformers(
    make_engine: MakeEngine, reference: Reference, temperature: float
) -> None:
    engine = make_engine()
    async with running(engine):
        # Two more of another temperature, so that a batch has both kinds.
        asked = requests(6, max_new_tokens=40, temperature=temperature)
        asked += [r | {"temperature": 1.0 - temperature} for r in requests(8)[6:]]
        results = await results_of(engine, asked)
        worst = torch.cat(
            [
                reference.errors(request, results[request["id"]], 0, request["temperature"])
                for request in asked
            ]
        )
    print(f"temperature {temperature}: worst {worst.max():.1e}, mean {worst.mean():.1e}")
    assert worst.max() < reference.atol


@on_the_engines_loop
async def test_an_update_brings_logprobs_of_the_new_weights(
    make_engine: MakeEngine, reference: Reference, model_kind: str, tmp_path: Path
) -> None:
    engine = make_engine()
    async with running(engine):
        asked = requests(4, max_new_tokens=24, temperature=0.0)
        for version in range(3):
            if version:
                await engine.pause("keep")
                await publish(engine, weights(model_kind, version), version, tmp_path)
            for turn in range(2):  # the second time with cached prefixes
                results = await results_of(engine, asked)
                for request in asked:
                    completion = results[request["id"]]
                    errors = reference.errors(request, completion, version, 0.0)
                    assert errors.max() < reference.atol, (version, turn, errors)
                    assert set(completion.versions) == {version}
                others = reference.errors(asked[0], results[0], version + 1, 0.0)
                assert others.max() > 4 * reference.atol, "too much alike to tell"


@on_the_engines_loop
async def test_replayed_weights_generate_exactly_as_loaded_ones(
    make_engine: MakeEngine, model_kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first update records a plan; later ones replay it, also after a sleep that loses the
    weights.

    Requests come one at a time. Engines make batches of what has arrived, and equal weights give
    equal logprobs only in equal batches.
    """
    caplog.set_level(logging.DEBUG, logger=adapter_engine.__name__)

    def plans() -> list[str]:
        return [text for text in caplog.messages if "recorded a load" in text]

    engine = make_engine()
    async with running(engine):
        asked = requests(4, max_new_tokens=24, temperature=0.0)
        results: list[list[Completion]] = []
        for version, seed in enumerate((1, 2, 1), start=1):
            # In an order of its own, so that a plan of an earlier test does not fit.
            tensors = dict(reversed(weights(model_kind, seed).items()))
            await engine.pause("abort")
            if version == 3:
                await engine.sleep(2)
                await engine.wake(["weights", "kv_cache"])
            await publish(engine, tensors, version, tmp_path)
            results.append([(await results_of(engine, [each]))[each["id"]] for each in asked])
            assert len(plans()) == 1
    assert "the engine's loader for 0 layers" in plans()[0]
    for loaded, other, replayed in zip(*results, strict=True):
        assert replayed.tokens == loaded.tokens
        assert replayed.logprobs == loaded.logprobs
        assert other.logprobs != loaded.logprobs


@pytest.fixture(scope="session")
def cuda_context() -> None:
    """Opens every device before any test, so that its descriptors do not count as left behind."""
    for idx in range(torch.cuda.device_count()):
        torch.cuda.mem_get_info(idx)


@pytest.mark.usefixtures("cuda_context")
@pytest.mark.parametrize("level", [1, 2])
@on_the_engines_loop
async def test_sleep_gives_device_memory_back(
    make_engine: MakeEngine, model_kind: str, tmp_path: Path, level: Any
) -> None:
    def free_nbytes() -> int:
        """On all devices: an engine's workers have one each."""
        return sum(torch.cuda.mem_get_info(idx)[0] for idx in range(torch.cuda.device_count()))

    engine = make_engine()
    async with running(engine):
        asked = requests(8, temperature=0.0)
        before = await results_of(engine, asked)
        stats, free_awake = await engine.stats(), free_nbytes()
        await engine.pause("abort")

        await engine.sleep(level)

        freed = free_nbytes() - free_awake
        held = stats["kv_nbytes"] + stats["weights_nbytes"]
        print(f"level {level}: freed {freed / 2**20:.0f} MiB of {held / 2**20:.0f}")
        assert held > 0
        assert freed >= 0.95 * held
        await engine.wake(["weights", "kv_cache"])
        if level == 2:
            await publish(engine, weights(model_kind), 1, tmp_path)
        else:
            await engine.resume()
        after = await results_of(engine, asked)
    for i in range(8):
        assert after[i].tokens == before[i].tokens


@on_the_engines_loop
async def test_256_requests_at_once_come_back_whole(make_engine: MakeEngine) -> None:
    engine = make_engine()
    async with running(engine):
        results = await results_of(engine, requests(256, max_new_tokens=100))
    assert all(len(results[i].tokens) == 100 for i in range(256))


@pytest.fixture(scope="session")
def rank_variables() -> dict[str, str]:
    """Of the environment of ranks: which GPU they use."""
    return {}


@pytest.mark.process
def test_weights_read_from_the_trainer_s_gpu_generate_as_those_through_the_host(
    make_engine: MakeEngine, model_kind: str, tmp_path: Path, rank_variables: dict[str, str]
) -> None:
    async def body() -> None:
        engine = make_engine(load_weights=False)
        in_pool = EngineInPool(engine)
        async with running(engine):
            outputs: list[list[list[int]]] = []
            for transport in ("memfd", "cuda_ipc"):
                async with pool_of(in_pool, tmp_path, transport=transport) as coordinator:
                    for seed in (1, 2):
                        ranks[0].call("make", model_kind, seed, None)
                        report = await ranks[0].publish(coordinator, len(outputs) + 1)
                        await coordinator.wait_settled()
                        print(f"seed {seed}: {report}")
                        assert report["transport"] == transport
                        assert not report["failed"]
                        found = await results_of(engine, requests(8, temperature=0.0))
                        outputs.append([found[i].tokens for i in range(8)])

        assert outputs[0] != outputs[1]
        assert outputs[2:] == outputs[:2]

    with rank_processes(tmp_path, env=rank_variables) as ranks:
        run_async(body)


@pytest.mark.process
def test_versions_in_the_same_memory_generate_as_those_through_the_host(
    make_engine: MakeEngine, model_kind: str, tmp_path: Path, rank_variables: dict[str, str]
) -> None:
    """The second one prepares copies, which later ones run, also after a sleep that loses the
    weights. At last a tensor gets other memory."""

    async def body() -> None:
        engine = make_engine(load_weights=False)
        in_pool = EngineInPool(engine)
        outputs: list[list[list[int]]] = []

        async def publish_next(coordinator: SyncCoordinator, transport: str) -> None:
            report = await ranks[0].publish(coordinator, len(outputs) + 1)
            await coordinator.wait_settled()
            print(report)
            assert report["transport"] == transport
            assert not report["failed"]
            found = await results_of(engine, requests(8, temperature=0.0))
            outputs.append([found[i].tokens for i in range(8)])
            ranks[0].call("negate")

        async with running(engine):
            async with pool_of(in_pool, tmp_path, transport="memfd") as coordinator:
                for _ in range(2):
                    await publish_next(coordinator, "memfd")
            async with pool_of(in_pool, tmp_path, transport="cuda_ipc") as coordinator:
                for idx in range(6):
                    if idx == 4:
                        await in_pool.pause("abort", 10.0)
                        await engine.sleep(2)
                        await engine.wake(["weights", "kv_cache"])
                    if idx == 5:
                        ranks[0].call("move", "model.embed_tokens.weight")
                    await publish_next(coordinator, "cuda_ipc")

        assert outputs[0] != outputs[1]
        assert outputs[2:] == outputs[:2] * 3

    with rank_processes(tmp_path, env=rank_variables) as ranks:
        ranks[0].call("make", model_kind, 1, None)
        run_async(body)


def open_files() -> list[str]:
    return [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]


@pytest.mark.process
def test_a_level_2_sleeper_is_updated_from_the_trainer_s_gpu_without_an_image(
    make_engine: MakeEngine, model_kind: str, tmp_path: Path, rank_variables: dict[str, str]
) -> None:
    async def body() -> None:
        engine = make_engine(load_weights=False)
        in_pool = EngineInPool(engine)
        async with (
            running(engine),
            pool_of(in_pool, tmp_path, transport="cuda_ipc") as coordinator,
        ):
            ranks[0].call("make", model_kind, 1, None)
            await ranks[0].publish(coordinator, 1)
            await coordinator.wait_settled()
            before = await results_of(engine, requests(8, temperature=0.0))
            await in_pool.pause("abort", 10.0)
            await engine.sleep(2)
            await engine.wake(["weights", "kv_cache"])

            report = await ranks[0].publish(coordinator, 2)
            await coordinator.wait_settled()

            print(report)
            assert report["transport"] == "cuda_ipc"
            assert not any("umbra-weights" in file for file in open_files())
            after = await results_of(engine, requests(8, temperature=0.0))
        for i in range(8):
            assert after[i].tokens == before[i].tokens

    with rank_processes(tmp_path, env=rank_variables) as ranks:
        run_async(body)
