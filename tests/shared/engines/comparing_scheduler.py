"""Runs in vLLM's EngineCore: what umbra sends, compared with vLLM's own slices of the same step."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from umbra.engines.vllm import vllm_outputs

SCHEDULER: Final = f"{__name__}.make_scheduler"
PREEMPTED: Final = "UMBRA_TEST_PREEMPTED"
"""Variable with the path of a file that is made when a request is preempted."""


def make_scheduler(**parts: Any) -> Any:
    scheduler = vllm_outputs.make_scheduler(**parts)
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
    return scheduler
