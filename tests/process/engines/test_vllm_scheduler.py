"""vLLM's schedulers with what umbra changes in them, beside vLLM's own over the same requests."""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_runs import needs_vllm

from umbra.engines.vllm.vllm_scheduler import skip_unchanged

pytestmark = [
    needs_vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]
BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 48, 16
NUM_STEPS = 600
COMMON_PREFIX = list(range(40))


def module(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")


@contextmanager
def vllm_config(folder: Path) -> Generator[Any]:
    made = module("engine.arg_utils").EngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=MAX_NUM_SEQS,
        skip_tokenizer_init=True,
        enable_chunked_prefill=False,
    )
    config = made.create_engine_config()
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    with module("config").set_current_vllm_config(config):
        yield config


def make_scheduler(config: Any, kind: str) -> Any:
    interface = module("v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    caches = interface.KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
    )
    file = {"Scheduler": "scheduler", "AsyncScheduler": "async_scheduler"}[kind]
    return getattr(module(f"v1.core.sched.{file}"), kind)(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=module("v1.structured_output").StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def count_calls(manager: Any) -> list[None]:
    """One entry for each time that vLLM's own `allocate_slots` runs."""
    calls: list[None] = []
    allocate_slots: Callable[..., Any] = manager.allocate_slots

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return allocate_slots(*args, **options)

    manager.allocate_slots = counted
    return calls


def cache_state(scheduler: Any) -> Any:
    """The contents of the cache's blocks, whose they are, and the order in which free ones go."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    (group,) = manager.coordinator.single_type_managers
    held = {key: [b.block_id for b in blocks] for key, blocks in group.req_to_blocks.items()}
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    return held, group.num_cached_block, free, [(b.ref_cnt, b.block_hash) for b in pool.blocks]


class Traffic:
    """Draws requests, their tokens and aborts for two schedulers alike."""

    def __init__(self, config: Any) -> None:
        self.draw = random.Random(0)
        utils = module("v1.core.kv_cache_utils")
        hashes = module("utils.hashing").get_hash_fn_by_name("sha256")
        utils.init_none_hash(hashes)
        self.hasher = utils.get_request_block_hasher(BLOCK_SIZE, hashes)
        self.num_added = 0

    def add(self, schedulers: list[Any]) -> None:
        prompt = COMMON_PREFIX + [self.draw.randrange(100) for _ in range(self.draw.randrange(40))]
        num_new = self.draw.randrange(1, 100)
        key = f"request-{self.num_added}"
        self.num_added += 1
        for scheduler in schedulers:
            params = module("sampling_params").SamplingParams(
                max_tokens=num_new, stop_token_ids=[99], ignore_eos=True
            )
            request = module("v1.request").Request(
                key, list(prompt), params, None, block_hasher=self.hasher
            )
            scheduler.add_request(request)

    def made_from(self, scheduled: Any) -> list[Any]:
        """A model's outputs of a step, one for each of two schedulers."""
        keys = list(scheduled.num_scheduled_tokens)
        tokens = [self.draw.randrange(100) for _ in keys]
        return [
            module("v1.outputs").ModelRunnerOutput(
                req_ids=keys,
                req_id_to_index={key: row for row, key in enumerate(keys)},
                sampled_token_ids=[[token] for token in tokens],
            )
            for _ in range(2)
        ]


@pytest.mark.parametrize("kind", ["Scheduler", "AsyncScheduler"])
def test_the_scheduler_does_the_same_without_calls_that_change_nothing(
    model_folder: Callable[[str], Path], kind: str
) -> None:
    finished = module("v1.request").RequestStatus.FINISHED_ABORTED
    num_preempted = 0
    with vllm_config(model_folder("qwen3")) as config:
        pair = [make_scheduler(config, kind) for _ in range(2)]
        all_calls, calls = (count_calls(scheduler.kv_cache_manager) for scheduler in pair)
        skip_unchanged(pair[1].kv_cache_manager)
        traffic = Traffic(config)
        in_flight: list[Any] = []

        for step in range(NUM_STEPS):
            while sum(pair[0].get_request_counts()) < MAX_NUM_SEQS:
                traffic.add(pair)
            if step % 20 == 19:
                key = traffic.draw.choice(sorted(pair[0].requests))
                for scheduler in pair:
                    scheduler.finish_requests([key], finished)
            if step % 150 == 149:
                assert len({scheduler.reset_prefix_cache() for scheduler in pair}) == 1

            expected, scheduled = (scheduler.schedule() for scheduler in pair)
            assert asdict(scheduled) == asdict(expected)
            num_preempted += len(scheduled.preempted_req_ids)
            in_flight.append((expected, scheduled))
            if kind == "AsyncScheduler" and len(in_flight) == 1:
                continue  # this step runs while the next is scheduled
            of_step = in_flight.pop(0)
            updated = [
                scheduler.update_from_output(each, made)
                for scheduler, each, made in zip(
                    pair, of_step, traffic.made_from(of_step[0]), strict=True
                )
            ]
            first, second = ([each.outputs for each in found.values()] for found in updated)
            assert str(first) == str(second)
            assert cache_state(pair[0]) == cache_state(pair[1])

    assert num_preempted > 10
    assert len(calls) < len(all_calls) / 3
