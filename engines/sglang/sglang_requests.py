from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from umbra.runtime.engine_api.generation_request import GenerationRequest

_MESSAGES_PER_STEP: Final = 5
_MIN_STREAM_INTERVAL: Final = 2
# With an interval of 1, SGLang 0.5.17 sends an empty message for a request that it preempts during
# prefill, and never sends the logprob of its first token.
_MAX_STREAM_INTERVAL: Final = 50


def check_request(request: GenerationRequest, model_stop_ids: Collection[int]) -> None:
    """Raises ValueError where the model's own stop tokens would end a request."""
    others = set(model_stop_ids) - set(request.stop_token_ids)
    if request.stop_token_ids and others:
        raise ValueError(
            f"request {request.id}: SGLang would stop at the model's own end-of-text tokens "
            f"{sorted(others)}, too; add them to stop_token_ids, or leave that empty"
        )


def stream_interval(num_running: int) -> int:
    """Tokens from one message of a request to its next. SGLang's scheduler spends about 27 us on a
    message (0.5.17; 256 requests: 7 ms a step). With 250 running requests the interval is 50, which
    SGLang itself uses for requests that do not stream."""
    interval = num_running // _MESSAGES_PER_STEP
    return min(max(_MIN_STREAM_INTERVAL, interval), _MAX_STREAM_INTERVAL)


def generate_fields(
    request: GenerationRequest, key: str, cache_salt: str, interval: int, adapter_id: str = ""
) -> dict[str, Any]:
    """Arguments for GenerateReqInput, with logprobs of sampled tokens. With `top_p` or `top_k`,
    SGLang reports the whole distribution's logprobs. An `interval` above 1 needs a version with
    `stream_interval`."""
    return {
        "rid": key,
        "input_ids": request.tokens.tolist(),
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,  # 0 becomes top_k = 1 at temperature 1
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": 0.0,
            "stop_token_ids": list(request.stop_token_ids),
            # True would switch off stop_token_ids, too.
            "ignore_eos": not request.stop_token_ids,
            # Used with enable_deterministic_inference only. A draw depends on the seed and the
            # index in the sequence, so a resumed trajectory needs no other seed.
            "sampling_seed": request.seed,
            **({"stream_interval": interval} if interval > 1 else {}),
        },
        "return_logprob": True,
        "logprob_start_len": -1,  # none of the prompt
        "stream": True,
        "extra_key": cache_salt,
        **({"lora_id": adapter_id} if adapter_id else {}),
    }
