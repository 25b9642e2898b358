"""One tokenizer for prompts, agents, judges and serving: what transformers makes of the model."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from model_folders import special, write_model_folder
from transformers import AutoTokenizer

from umbra.runtime.errors import DataError
from umbra.runtime.text.model_files import default_context_len
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.serving.served_pool import ModelText

TEXT: Final = "tool result: " + "0123456789" * 5
MESSAGES: Final = [{"role": "user", "content": "é <|im_end|> 2+2?"}]
KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "truncation": {"saved": {"truncation": {"max_length": 16}}},
    "padding": {"saved": {"padding": {"length": 96, "pad_id": 0, "pad_token": "<pad>"}}},
    "bos": {"added": ["bos"]},
}


def saved_and_opened(tokenizer: ModelTokenizer, path: Path) -> ModelTokenizer:
    tokenizer.save(path)
    return ModelTokenizer.open(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_process_has_the_tokens_that_transformers_has(tmp_path: Path, kind: str) -> None:
    folder = write_model_folder(tmp_path / "model", **KINDS[kind])
    auto: Any = AutoTokenizer
    expected = auto.from_pretrained(str(folder))
    chat = expected.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    tokenizer = ModelTokenizer.open(folder)
    plain_tokens = expected(TEXT, add_special_tokens=False)["input_ids"]

    for opened in (tokenizer, saved_and_opened(tokenizer, tmp_path / "run" / "policy.json")):
        assert opened.encode(TEXT) == plain_tokens
        assert opened.encode_prompt(TEXT) == expected(TEXT)["input_ids"]
        assert opened.render_chat(MESSAGES, {}) == chat
        assert opened.decode_all(plain_tokens) == TEXT
        assert opened.state == tokenizer.state

    served = asyncio.run(ModelText(folder, trust_remote_code=False).encode(TEXT))
    assert served == tokenizer.encode_prompt(TEXT)


def test_other_threads_run_while_a_text_is_tokenized(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.open(write_model_folder(tmp_path))

    def tokenize() -> float:
        began_s = time.thread_time()
        tokenizer.encode(TEXT * 5000)
        return time.thread_time() - began_s

    with ThreadPoolExecutor(1) as threads:
        began_s = time.thread_time()
        tokenized = threads.submit(tokenize)
        while not tokenized.done():
            pass
        own_s = time.thread_time() - began_s

    assert own_s > tokenized.result() / 5, "both get processor time, however little there is"


def test_a_prompt_has_at_most_one_bos_and_no_eos_behind_it(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, added=["bos", "eos"])
    bos, eos = special("<s>", "</s>")
    tokenizer = ModelTokenizer.open(folder)

    for text in ("2+2=", "<s>2+2="):
        tokens = tokenizer.encode_prompt(text)
        assert (tokens.count(bos), tokens[0], tokens.count(eos)) == (1, bos, 0)
        assert tokenizer.decode(tokens) == "2+2="


def test_end_tokens_are_those_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    turn, text = special("<|im_end|>", "</s>")

    def ends(name: str, **ids: Any) -> list[int]:
        folder = write_model_folder(tmp_path / name, **ids)
        return ModelTokenizer.open(folder).stop_token_ids()

    assert ends("tokenizer", eos="<|im_end|>", eos_of_config=2) == [text, turn]
    assert ends("generation", eos_of_config=4, eos_of_generation=[0]) == [0, text, turn]
    assert ends("all the same", eos_of_config=2, eos_of_generation=2) == [text]
    assert ends("tokenizer alone", eos_of_config=None) == [text]


def test_a_model_without_end_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, eos_of_config=None)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"eos_token": "</s>", ', ""))
    tokenizer = ModelTokenizer.open(folder)

    assert tokenizer.stop_token_ids([7]) == [7]
    with pytest.raises(DataError, match=r"names no eos_token_id .*set rollout.stop_token_ids"):
        tokenizer.stop_token_ids()


def test_sizes_of_a_model_that_takes_images_are_those_of_its_part_for_text(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    text = {"vocab_size": 9, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({"text_config": text}))

    assert default_context_len(folder) == 64
    with pytest.raises(DataError, match=r"has token id \d+, but the model has vocab_size 9: they"):
        ModelTokenizer.open(folder)


def test_a_completion_keeps_the_special_tokens_that_mean_something(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, eos="<|im_end|>")
    tokenizer = ModelTokenizer.open(folder)
    thought = tokenizer.encode("<think>2+2=4</think>4<|im_end|></s><pad>")
    call = tokenizer.encode('[TOOL_CALLS]{"name":"add"}</s>')

    assert tokenizer.decode_completion(thought) == "<think>2+2=4</think>4"
    assert tokenizer.decode_completion(call) == '[TOOL_CALLS]{"name":"add"}'
    assert tokenizer.decode_completion(thought, skip_special_tokens=True) == "2+2=44"


def test_text_that_is_no_special_token_stays_though_it_ends_a_completion(tmp_path: Path) -> None:
    colon = ModelTokenizer.open(write_model_folder(tmp_path / "a")).encode(":")

    tokenizer = ModelTokenizer.open(write_model_folder(tmp_path / "b", eos_of_generation=colon))

    assert colon[0] in tokenizer.end_token_ids
    assert tokenizer.decode_completion(tokenizer.encode("so:</s>")) == "so:"


def test_messages_are_refused_until_a_chat_template_is_put_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    folder = write_model_folder(tmp_path / "model", template="")
    tokenizer = ModelTokenizer.open(folder)

    with pytest.raises(DataError, match=r"no chat template.*folder, a file chat_template\.jinja"):
        tokenizer.render_chat(MESSAGES, {})
    with pytest.raises(DataError, match="has no chat template"):
        tokenizer.render_whole(MESSAGES, {}, asks_for_answer=True)

    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert ModelTokenizer.open(folder).render_chat(MESSAGES, {}) == "é <|im_end|> 2+2?!"
