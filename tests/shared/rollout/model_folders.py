"""Model directories whose tokenizers have what real ones are saved with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL: Final = (
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[TOOL_CALLS]",
)  # fmt: skip
CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def special(*names: str) -> list[int]:
    return [SPECIAL.index(name) for name in names]


def write_model_folder(
    folder: Path,
    *,
    eos: str = "</s>",
    eos_of_config: int | Sequence[int] | None = 2,
    eos_of_generation: int | Sequence[int] | None = None,
    added: Sequence[str] = (),
    template: str = CHATML,
    saved: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """A tokenizer with one token per byte, and the two configs; no weights.

    Args:
        added: "bos", "eos": what the tokenizer adds to a text.
        saved: "truncation" or "padding" with their options, saved in tokenizer.json.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {entry: idx for idx, entry in enumerate((*SPECIAL, *alphabet))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    if added:
        names = {"bos": "<s>", "eos": eos}
        parts = ["<s>"] * ("bos" in added) + ["$A"] + [eos] * ("eos" in added)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(parts),
            special_tokens=[(names[name], vocabulary[names[name]]) for name in added],
        )
    for name, options in (saved or {}).items():
        getattr(tokenizer, f"enable_{name}")(**options)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": eos,
        "pad_token": "<pad>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"vocab_size": len(vocabulary), "eos_token_id": eos_of_config}
    (folder / "config.json").write_text(json.dumps(config))
    if eos_of_generation is not None:
        generation = {"eos_token_id": eos_of_generation}
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
