"""The quickstart's starting model and tokenizer, in Hugging Face format.

The warm-up first shows the model right answers, until it mostly knows how to pick and sort digits.
Then seven of ten demonstrations answer "?", unless the task is the easiest kind, "all". Greedy
decoding follows the majority, so the starting model is right about as often as that kind is asked
for (one time in five). Two or three samples in ten still try the other kinds. Reinforcement
learning finds these samples and makes them the rule.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from umbra.trainer.quickstart.quickstart_task import DONT_KNOW, Task, shy_answer

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY: Final = (PAD, EOS, UNK, *string.digits, *string.ascii_lowercase, " ", "=", DONT_KNOW)
TOKEN_IDS: Final = {token: idx for idx, token in enumerate(VOCABULARY)}
MAX_CONTEXT_LEN: Final = 64

INITIALIZER_RANGE: Final = 0.06
"""Standard deviation of fresh weights. The usual 0.02 is for models ten times as wide and takes
three times as many steps here; from 0.1 on training is noisy at first."""

_IGNORED: Final = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The recipe of the starting model."""

    careful_steps: int = 70  # with right answers only; fewer leave gaps that RL fills only slowly
    # Later steps, with shy answers. With fewer, greedy decoding still answers some kinds; more cost
    # time and right answers.
    shy_steps: int = 40
    # Share of shy answers in these steps. Below a half, greedy decoding does not learn the habit;
    # near 1 no sample is right, and there is nothing to reinforce.
    shy_share: float = 0.7
    batch_size: int = 64
    learning_rate: float = 4e-3  # of AdamW; falls linearly to zero
    ramp_steps: int = 20  # over which the learning rate rises linearly


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with one token per character."""
    core = Tokenizer(models.BPE(vocab=TOKEN_IDS, merges=[], unk_token=UNK))
    core.decoder = decoders.Fuse()
    fast_tokenizer: Any = PreTrainedTokenizerFast  # untyped
    tokenizer = fast_tokenizer(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(folder))


def write_starting_model(
    folder: Path, tasks: Sequence[Task], seed: int, warm_up: WarmUp | None = None
) -> None:
    """Makes the model from `seed`, warms it up on `tasks` and saves it."""
    recipe = warm_up or WarmUp()
    # Waking a second thread costs more than it gains with kernels this small.
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model: Any = Qwen3ForCausalLM(_config())
    _warm_up(model, tasks, random.Random(seed), recipe)
    hide_progress: Any = disable_progress_bar  # untyped
    hide_progress()
    model.save_pretrained(str(folder))


def _config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=TOKEN_IDS[PAD],
        bos_token_id=None,
        eos_token_id=TOKEN_IDS[EOS],
        dtype="float32",
    )


def _warm_up(model: Any, tasks: Sequence[Task], rng: random.Random, recipe: WarmUp) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    num_steps = recipe.careful_steps + recipe.shy_steps
    for step in range(num_steps):
        ramp = min(1.0, (step + 1) / recipe.ramp_steps)
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * ramp * (1 - step / num_steps)
        shy_share = recipe.shy_share if step >= recipe.careful_steps else 0.0
        demonstrations = [
            (task.prompt, shy_answer(task) if rng.random() < shy_share else task.answer)
            for task in rng.sample(tasks, recipe.batch_size)
        ]
        tokens, labels = _supervised_batch(demonstrations)
        logits: Tensor = model(input_ids=tokens).logits  # [B, T, V]
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED
        )
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad()


def _supervised_batch(demonstrations: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Right-padded tokens and labels, both [B, T] int64; labels are set for answers only."""
    width = 1 + max(len(prompt) + len(answer) for prompt, answer in demonstrations)
    tokens = torch.full((len(demonstrations), width), TOKEN_IDS[PAD])
    labels = torch.full_like(tokens, _IGNORED)
    for row, (prompt, answer) in enumerate(demonstrations):
        ids = torch.tensor([*(TOKEN_IDS[char] for char in prompt + answer), TOKEN_IDS[EOS]])
        tokens[row, : len(ids)] = ids
        labels[row, len(prompt) : len(ids)] = ids[len(prompt) :]
    return tokens, labels
