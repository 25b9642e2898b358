"""From umbra's generation requests to SGLang's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from umbra.runtime.engine_api.generation_request import GenerationRequest

_MESSAGES_PER_STEP: Final = 5
_MIN_STREAM_INTERVAL: Final = 2
# With 1, SGLang 0.5.17 sends an empty message of a request that it puts back while its prompt is
# computed, and the logprob of its first token never.
_MAX_STREAM_INTERVAL: Final = 50


def check_request(request: GenerationRequest, model_stop_ids: Collection[int]) -> None:
    """Raises ValueError for what SGLang would do otherwise than asked.

    Args:
        model_stop_ids: end every request that has any stop tokens.
    """
    others = set(model_stop_ids) - set(request.stop_token_ids)
    if request.stop_token_ids and others:
        raise ValueError(
            f"request {request.id}: SGLang would stop at the model's own end-of-text tokens "
            f"{sorted(others)}, too; add them to stop_token_ids, or leave that empty"
        )


def stream_interval(num_running: int) -> int:
    """Tokens from one message of a request to its next.

    SGLang's scheduler takes about 27 us for a message (0.5.17; 256 requests: 7 ms a step). Those of
    requests that do not stream it sends each 50 tokens: here as seldom where there are 250.
    """
    interval = num_running // _MESSAGES_PER_STEP
    return min(max(_MIN_STREAM_INTERVAL, interval), _MAX_STREAM_INTERVAL)


def generate_fields(
    request: GenerationRequest, key: str, cache_salt: str, interval: int
) -> dict[str, Any]:
    """Arguments for GenerateReqInput: the distribution as it is, logprobs of what is sampled.

    Args:
        interval: 1 sends each token; more is for versions that have a `stream_interval`.
    """
    return {
        "rid": key,
        "input_ids": request.tokens.tolist(),
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,  # 0 becomes top_k = 1 at temperature 1
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "stop_token_ids": list(request.stop_token_ids),
            # Would switch off stop_token_ids, too.
            "ignore_eos": not request.stop_token_ids,
            # Of use with enable_deterministic_inference only. A draw depends on the seed and the
            # place in the sequence, so the rest of a cut trajectory needs no other seed.
            "sampling_seed": request.seed,
            **({"stream_interval": interval} if interval > 1 else {}),
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # none of the prompt
        "stream": True,
        "extra_key": cache_salt,
    }
