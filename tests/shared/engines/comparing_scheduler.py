"""Runs in vLLM's EngineCore: compares what umbra sends with vLLM's own slices of the same step, and
makes the calls of the cache's manager that umbra leaves out."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from umbra.engines.vllm import vllm_scheduler

SCHEDULER: Final = f"{__name__}.make_scheduler"
PREEMPTED: Final = "UMBRA_TEST_PREEMPTED"
"""Variable with the path of a file that is made when a request is preempted."""


def make_scheduler(**parts: Any) -> Any:
    scheduler = vllm_scheduler.make_scheduler(**parts)
    update_from_output = scheduler.update_from_output

    def update(scheduled: Any, made: Any) -> Any:
        whole = made.logprobs
        if scheduled.preempted_req_ids:
            Path(os.environ[PREEMPTED]).touch()
        updated = update_from_output(scheduled, made)
        for message in updated.values():
            for output in message.outputs:
                if tokens := output.new_token_ids:
                    row = made.req_id_to_index[output.request_id]
                    own = whole.slice_request(row, len(tokens))
                    assert own.logprob_token_ids[:, 0].tolist() == tokens
                    assert output.new_logprobs is None
                    assert output.kv_transfer_params == {"logprobs": own.logprobs[:, 0].tolist()}
        return updated

    scheduler.update_from_output = update
    repeat_calls(scheduler.kv_cache_manager)
    return scheduler


def repeat_calls(manager: Any) -> None:
    """Makes vLLM's own call after umbra's: once a call is done, its repetition changes nothing."""
    (group,) = manager.coordinator.single_type_managers
    allocate_slots = manager.allocate_slots

    def held(key: str) -> Any:
        return len(group.req_to_blocks[key]), group.num_cached_block.get(key)

    def allocate(request: Any, num_new_tokens: int, **options: Any) -> Any:
        found = allocate_slots(request, num_new_tokens, **options)
        if found is not None and "new_computed_blocks" not in options:  # of a running request
            before = held(request.request_id)
            again = type(manager).allocate_slots(manager, request, num_new_tokens, **options)
            assert again is manager.empty_kv_cache_blocks
            assert held(request.request_id) == before
        return found

    manager.allocate_slots = allocate
