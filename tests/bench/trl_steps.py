"""TRL's side of grpo_vs_trl.py; runs in TRL's own environment and prints one JSON object.

python trl_steps.py MODEL PROMPTS OUT_DIR STEPS MAX_NEW_TOKENS
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingImports=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets  # pyright: ignore[reportMissingTypeStubs]
import torch
from random_reward import reward
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUM_COMPLETIONS, GROUP_SIZE = 256, 8


class StepClock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    model, prompts, out_dir, steps, max_new_tokens = sys.argv[1:]
    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    config = GRPOConfig(
        output_dir=out_dir,
        max_steps=int(steps),
        per_device_train_batch_size=NUM_COMPLETIONS,
        num_generations=GROUP_SIZE,
        max_completion_length=int(max_new_tokens),
        gradient_accumulation_steps=1,
        learning_rate=1e-8,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )
    trainer.train()
    lengths = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    times = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    print(
        json.dumps(
            {
                "step_s": times,
                "completion_len_mean": sum(lengths) / len(lengths),
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
