"""The config of supervised fine-tuning: what it refuses before anything starts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
from minimal_config import MINIMAL

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import annotations_of
from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.sft_config import RL_ONLY, SftConfig
from umbra.trainer.config.trainer_config import TrainerConfig

DOCUMENT: Final = Path(__file__).resolve().parents[3] / "docs" / "sft.md"
VALUES: dict[str, Any] = {name: MINIMAL[name] for name in ("model", "data", "train")}


def config(*overrides: str, **sections: Any) -> SftConfig:
    return check_config(SftConfig, VALUES | sections, "config", overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.loss=gspo", "only RL training has a use for train.loss: leave it out"),
        ("train.kl_coef=0.1", "only RL training has a use for train.kl_coef"),
        ("train.loss_args.tau=1", "only RL training has a use for train.loss_args"),
        ("data.id_column=name", "only RL training has a use for data.id_column"),
        ("rollout.group_size=4", "only `python -m umbra.trainer` uses it, leave it out"),
        ("sft.batch_sise=4", "sft.batch_sise is unknown; did you mean 'batch_size'?"),
        ("sft.batch_size=0", "(command line): input should be greater than or equal to 1"),
        ("sft.loss_on=first", "(command line): input should be 'all' or 'last', got 'first'"),
        ("train.epochs=2", "train.steps = 10 and train.epochs = 2.0: "),
        ("train.max_length=9", "'max_length' of TRL: use 'sft.max_len'"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config(override)

    assert words in str(raised.value)
    assert override in str(raised.value)


def test_sections_of_the_other_training_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"reward is unknown here: only `python -m umbra.trainer`"
    ):
        config(reward={"function": "rewards:score"})
    with pytest.raises(ConfigError, match=r"only `python -m umbra.trainer.sft` uses it"):
        check_config(TrainerConfig, MINIMAL | {"sft": {}}, "config")


SHARED = {
    "run": "dir loggers name overwrite resume",
    "data": "chat_template_kwargs eval eval_limit format messages_column overlong prompt_column "
    "shuffle system_prompt template train",
    "train": "activation_checkpointing betas checkpoint_every compile device ema epochs eps "
    "eval_at_start eval_every export keep_checkpoints learning_rate max_grad_norm "
    "max_tokens_per_micro_batch micro_batches min_lr_ratio optimizer schedule seed "
    "shutdown_grace_s skip_nonfinite steps warmup_ratio warmup_steps weight_decay",
}


@pytest.mark.parametrize("section", RL_ONLY)
def test_each_setting_of_a_shared_section_is_used_or_refused(section: str) -> None:
    names = annotations_of(annotations_of(SftConfig)[section])

    assert {*SHARED[section].split(), *RL_ONLY[section]} == names.keys()


def test_an_empty_value_unsets_an_optional_setting() -> None:
    assert config("sft.max_len=8").sft.max_len == 8
    assert config("sft.max_len=", sft={"max_len": 8}).sft.max_len is None


def test_the_example_of_the_page_is_a_config() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)

    found = check_config(SftConfig, tomllib.loads(example), "example")

    assert found.with_steps(1000).train.total_steps == 32  # 2 passes, 64 rows a step


def test_epochs_become_steps() -> None:
    found = config("train.steps=", "train.epochs=1.1", "sft.batch_size=4")

    assert found.with_steps(40).train.total_steps == 11
    assert found.with_steps(41).train.total_steps == 12
