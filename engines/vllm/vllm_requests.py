from __future__ import annotations

import struct
from typing import Any, Final

import xxhash

from umbra.engines.vllm.vllm_library import VllmLibrary
from umbra.runtime.engine_api.generation_request import GenerationRequest

_MIN_TEMPERATURE: Final = 0.01
# vLLM raises lower temperatures to this one, which would return another distribution's logprobs.


def check_request(request: GenerationRequest) -> None:
    """Raises ValueError for a request that vLLM would silently change."""
    if 0 < request.temperature < _MIN_TEMPERATURE:
        raise ValueError(
            f"request {request.id}: temperature must be 0 (greedy) or at least "
            f"{_MIN_TEMPERATURE} with vLLM, got {request.temperature}"
        )


def sampling_params(library: VllmLibrary, request: GenerationRequest, vocab_size: int) -> Any:
    return library.SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=draw_seed(request.seed, request.position),
        max_tokens=request.max_new_tokens,
        # vLLM refuses stop tokens outside the vocabulary.
        stop_token_ids=[token for token in request.stop_token_ids if token < vocab_size],
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=library.RequestOutputKind.DELTA,
    )


def draw_seed(seed: int, position: int) -> int:
    """The seed for resuming a trajectory at `position`, in [0, 2**63). vLLM starts a generator with
    each request: the same seed would repeat the draws of the beginning."""
    if position == 0:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, position)) >> 1
