"""The model that `make smollm2` converts is SmolLM2-135M-Instruct, and its problems are honest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from smollm2 import needs_smollm2, smollm2_folder
from transformers import AutoTokenizer

from umbra.runtime.text.model_tokenizer import ModelTokenizer

pytestmark = [needs_smollm2, pytest.mark.slow]

MODEL = smollm2_folder() / "model"


def read_rows(task: str, name: str) -> list[dict[str, Any]]:
    lines = (smollm2_folder() / task / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_chat_is_rendered_by_the_models_own_template() -> None:
    auto: Any = AutoTokenizer
    raw, tokenizer = auto.from_pretrained(MODEL), ModelTokenizer.open(MODEL)

    text = tokenizer.render_chat([{"role": "user", "content": "12 + 7 ="}], {})
    tokens = tokenizer.encode(text)

    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n"
    )
    assert raw.convert_ids_to_tokens(tokens)[-14:] == [
        *("user", "Ċ", "1", "2", "Ġ+", "Ġ", "7", "Ġ=", "<|im_end|>", "Ċ"),
        *("<|im_start|>", "ass", "istant", "Ċ"),
    ]
    assert tokenizer.decode_all(tokens) == text
    assert tokenizer.end_token_ids == [raw.convert_tokens_to_ids("<|im_end|>")]


def test_the_config_is_that_of_the_published_model() -> None:
    config = json.loads((MODEL / "config.json").read_text())

    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["rms_norm_eps"], config["tie_word_embeddings"]) == (1e-5, True)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)


def test_held_out_problems_are_not_trained_on() -> None:
    for task in ("sums", "boxed"):
        questions = {
            name: [row["messages"][-1]["content"] for row in read_rows(task, name)]
            for name in ("train", "eval")
        }
        held_out = set(questions["eval"])
        assert len(held_out) == len(questions["eval"]) == 512
        assert not held_out & set(questions["train"])


def test_the_answer_of_a_sum_is_its_value() -> None:
    for row in read_rows("sums", "eval"):
        expression = row["messages"][-1]["content"].partition(": ")[2].removesuffix(" =")
        terms = expression.replace("- ", "-").replace("+ ", "").split()
        assert sum(map(int, terms)) == int(row["answer"])
