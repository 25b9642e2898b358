"""vLLM's scheduler with umbra's changes. It runs in EngineCore, whose Python bounds a small model's
decode steps on a GPU."""

from __future__ import annotations

import logging
from typing import Any, Final

from umbra.engines.vllm.vllm_outputs import send_numbers

SCHEDULER: Final = f"{__name__}.make_scheduler"
logger = logging.getLogger(f"vllm.{__name__}")  # vLLM's processes log nothing else


def make_scheduler(*, vllm_config: Any, **parts: Any) -> Any:
    """vLLM's own scheduler for its other options, with `send_numbers` and `skip_unchanged`."""
    vllm_config.scheduler_config.scheduler_cls = None
    scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
    logger.info(
        "The warning about %s does not apply: it makes vLLM's own %s",
        SCHEDULER, scheduler_class.__name__,
    )  # fmt: skip
    scheduler = scheduler_class(vllm_config=vllm_config, **parts)
    scheduler.update_from_output = send_numbers(scheduler.update_from_output)
    skip_unchanged(scheduler.kv_cache_manager)
    return scheduler


def skip_unchanged(manager: Any) -> None:
    """Makes vLLM's KVCacheManager return at once where a call changes nothing: the request's blocks
    have room for its next token, and no further block is full. In a decode step, these are nearly
    all requests, and vLLM makes two such calls for each, down three layers: a third of its
    scheduler's time. Only for models with full attention alone: for others, a call may free or copy
    blocks."""
    groups = manager.coordinator.single_type_managers
    if [type(group).__name__ for group in groups] != ["FullAttentionManager"]:
        return
    (group,) = groups
    blocks, num_cached, block_size = group.req_to_blocks, group.num_cached_block, group.block_size
    allocate_slots, cache_blocks = manager.allocate_slots, manager.cache_blocks

    def fills_block(key: str, num_tokens: int) -> bool:
        return num_tokens >= (num_cached.get(key, 0) + 1) * block_size

    def allocate(
        request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **of_waiting: Any
    ) -> Any:
        key = request.request_id
        num_slots = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        has_room = num_slots <= len(blocks.get(key, ())) * block_size
        if has_room and not fills_block(key, min(num_slots, request.num_tokens)):
            return manager.empty_kv_cache_blocks
        return allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **of_waiting
        )

    def cache(request: Any, num_computed_tokens: int) -> None:
        if fills_block(request.request_id, num_computed_tokens):
            cache_blocks(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate, cache
