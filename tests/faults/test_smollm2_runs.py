"""A real pretrained model is trained as it is: by the engine's own samples, up to its export."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import forced_logprobs, load_model
from smollm2 import needs_smollm2, smollm2_folder
from torch import Tensor
from transformers import AutoModelForCausalLM
from whole_runs import start_run

from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.reporting.metrics_loggers import read_metrics

pytestmark = [needs_smollm2, pytest.mark.process, pytest.mark.slow]

MODEL = smollm2_folder() / "model"
RUN_LIMIT_S = 300.0
CONFIG = f"""
[run]
dir = "run"
[model]
path = "{MODEL}"
dtype = "float32"
[data]
train = "{smollm2_folder() / "sums/train.jsonl"}"
[reward]
function = "plain_rewards:distinct"
python_path = ["{Path(__file__).parent}"]
[rollout]
groups_per_step = 2
group_size = 4
max_new_tokens = 16
[pool]
engine = "embedded"
max_num_seqs = 8
max_context_len = 128
[train]
steps = 2
learning_rate = 1e-5
"""


def logprobs_of_transformers(folder: Path, tokens: list[int], num_prompt: int) -> Tensor:
    """[T - num_prompt + 1, V]"""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0, num_prompt - 1 :], -1)


def test_two_steps_train_what_the_engine_sampled_and_the_export_is_the_trained_model(
    tmp_path: Path, fork_server: None
) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)

    with start_run(tmp_path, num_ranks=1) as started:
        ended = started.wait(RUN_LIMIT_S)

    assert ended.status == 0, ended.output
    steps = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["train/behaviour_kl"] < 1e-7 for row in steps)
    assert all(row["train/grad_norm"] > 0 for row in steps)

    export = tmp_path / "run/export"
    tokenizer = ModelTokenizer.open(export)
    chat = tokenizer.render_chat([{"role": "user", "content": "12 + 7 ="}], {})
    assert chat == ModelTokenizer.open(MODEL).render_chat(
        [{"role": "user", "content": "12 + 7 ="}], {}
    )
    assert tokenizer.end_token_ids == [2]
    assert json.loads((export / "config.json").read_text())["tie_word_embeddings"] is True
    prompt = tokenizer.encode(chat)
    tokens = [*prompt, *tokenizer.encode("12 + 7 is 19.")]
    trained = logprobs_of_transformers(export, tokens, len(prompt))
    ours = forced_logprobs(load_model(export), [tokens], len(prompt))[0]
    assert (ours - trained).abs().max() < 1e-3
    assert (logprobs_of_transformers(MODEL, tokens, len(prompt)) - trained).abs().max() > 1e-2
