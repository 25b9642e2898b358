# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import shutil
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Part of the folder's name: increase it with every change below.
_RECIPE: Final = "qwen3-1"
_SPECIALS: Final = ("<pad>", "<eos>", "<unk>")


def make_tiny_model(parent: Path, seed: int = 0) -> Path:
    """A tiny Hugging Face directory below `parent`: Qwen3 of 0.1 M parameters; a token is
    a character. Made once per seed, the same on every machine; skips the test if
    transformers is missing."""
    path = parent / f"{_RECIPE}-seed{seed}"
    if path.exists():
        return path
    pytest.importorskip("transformers")
    # Under another name first, so that parallel test processes never see half of it.
    fresh = Path(tempfile.mkdtemp(dir=parent))
    try:
        _save(fresh, seed)
        if not path.exists():
            fresh.rename(path)
    except FileExistsError:
        pass  # another process was faster
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return path


def _save(folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # Logits are far from uniform, so that greedy decoding has no near-ties.
        initializer_range=0.15,
        eos_token_id=_SPECIALS.index("<eos>"),
        pad_token_id=_SPECIALS.index("<pad>"),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    vocabulary = {token: idx for idx, token in enumerate((*_SPECIALS, *characters))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    return tokenizer
