"""A model whose completions have known lengths, for benchmarks that compare trainers.

Its tokens form a chain of pairs, {a1 b1} -> {a2 b2} -> ... -> {a255 b255} -> end: from either of a
pair both of the next are equally likely, and nothing else is. A prompt ending in `short` enters
the chain 31 tokens before the end, one ending in `long` at its start, so that completions have 32
or 256 tokens, the end included. The decoder layers compute as usual but hardly change the
outcome. 0.36 M parameters, Qwen3 shape.

Runs in the trainers' own environments, so it imports torch and transformers only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

SHORT_LEN, LONG_LEN = 32, 256
NUM_PROMPT_WORDS, PROMPT_LEN = 16, 10
PAD, END = 0, 1
# The next pair's logits stand about 7 times this above all others. Lower breaks the chain now and
# then; higher makes the others' gradients denormal numbers.
_SHARPNESS = 3.3


def _words() -> list[str]:
    prompt_words = [f"p{idx}" for idx in range(NUM_PROMPT_WORDS)]
    chain = [f"{name}{idx}" for idx in range(1, LONG_LEN) for name in "ab"]
    return ["<pad>", "<end>", "short", "long", *prompt_words, *chain]


def write_model(folder: Path, seed: int = 0) -> None:
    """A Hugging Face directory with model and tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    words = _words()
    ids = {word: idx for idx, word in enumerate(words)}
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=96,
        intermediate_size=208,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    torch.default_generator.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        embeddings = torch.nn.functional.normalize(torch.randn(len(words), 96), dim=-1)
        model.model.embed_tokens.weight.copy_(embeddings)
        head = torch.zeros_like(model.lm_head.weight)
        for word, successor in _successors():
            head[ids[successor]] += _SHARPNESS * embeddings[ids[word]]
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    _write_tokenizer(folder, ids)


def _successors() -> list[tuple[str, str]]:
    pairs = [(f"a{idx}", f"b{idx}") for idx in range(1, LONG_LEN)]
    steps = list(zip(pairs, [*pairs[1:], ("<end>",)], strict=True))
    steps += [(("long",), pairs[0]), (("short",), pairs[LONG_LEN - SHORT_LEN])]
    return [(word, successor) for words, after in steps for word in words for successor in after]


def _write_tokenizer(folder: Path, ids: dict[str, int]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer: Any = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_prompts(path: Path, num_prompts: int, long_share: float, seed: int = 0) -> None:
    """JSONL of prompts of 10 words; in every run of ten, `long_share` of them are long."""
    draw = random.Random(seed)
    num_long = round(10 * long_share)
    with path.open("w") as file:
        for idx in range(num_prompts):
            words = [f"p{draw.randrange(NUM_PROMPT_WORDS)}" for _ in range(PROMPT_LEN - 1)]
            words.append("long" if idx % 10 < num_long else "short")
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
