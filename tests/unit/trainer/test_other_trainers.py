"""An unknown setting with the name of another trainer is answered with what umbra has."""

from __future__ import annotations

import dataclasses

import pytest
from minimal_config import MINIMAL

from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import annotations_of
from umbra.trainer.config.config_file import check_config, other_names
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import LoraSection, TrainerConfig

ABSENT = "umbra does not have it; see docs/coming-from.md"


def own_settings() -> dict[str, set[str]]:
    """The keys of each section."""
    sections = annotations_of(SftConfig) | annotations_of(TrainerConfig)
    sections |= {"model.lora": LoraSection}
    return {
        name: {field.name for field in dataclasses.fields(section)}
        for name, section in sections.items()
        if dataclasses.is_dataclass(section)
    }


def said_about(override: str) -> str:
    """The answer in the error about an override, without where all settings are."""
    with pytest.raises(ConfigError) as raised:
        check_config(TrainerConfig, MINIMAL, "config", [override])
    (_, _, answer) = str(raised.value).partition(" is unknown; ")
    return answer.partition(" (docs/")[0]


def test_all_answers_are_settings_of_umbra() -> None:
    known = {f"{section}.{key}" for section, keys in own_settings().items() for key in keys}

    answers = {answer for names in other_names().values() for answer in names.values()}

    given = {one for answer in answers for one in answer.removeprefix("~ ").split(", ") if one}
    assert given <= known


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.beta=0.1", "'beta' of TRL: use 'train.kl_coef'"),
        (
            "train.eps_clip=0.2",
            "'eps_clip' of slime, AReaL, OpenRLHF: use 'train.clip_eps_low' and "
            "'train.clip_eps_high'",
        ),
        ("rollout.num-generations=8", "'num_generations' of TRL: use 'rollout.group_size'"),
        ("rollout.n=8", "'rollout.n' of verl: use 'rollout.group_size'"),
        ("train.n=8", "'n' of verl: use 'rollout.group_size'"),
        ("rollout.val_kwargs.n=8", "'rollout.val_kwargs.n' of verl: use 'eval.samples'"),
        ("val_kwargs.n=8", "'val_kwargs.n' of verl: use 'eval.samples'"),
        (
            "+actor_rollout_ref.rollout.n=8",
            "'actor_rollout_ref.rollout.n' of verl: use 'rollout.group_size'",
        ),
        (
            "critic.optim.lr=1e-5",
            "'critic.optim.lr' of verl, AReaL: not in umbra; nearest is 'critic.learning_rate'",
        ),
        ("critic.cliprange_value=1", "'critic.cliprange_value' of verl: use 'critic.value_clip'"),
        (
            "train.lr=1e-5",
            "'lr' of verl, slime, AReaL, prime-rl, SkyRL, NeMo-RL: use 'train.learning_rate'",
        ),
        ("train.fsdp=full_shard", "'fsdp' of TRL: not in umbra; nearest is 'model.fsdp_wrap'"),
        ("beta=0.1", "'beta' of TRL: use 'train.kl_coef'"),
        ("group_size=4", "did you mean 'rollout.group_size'?"),
        ("model.name=x", "'model.name' of prime-rl: use 'model.path'"),
        ("optim.lr=1e-5", "'optim.lr' of verl, prime-rl: use 'train.learning_rate'"),
        ("trainer.total_epochs=3", "'trainer.total_epochs' of verl: use 'train.epochs'"),
        (
            "trainer.model.lora.rank=8",
            "'trainer.model.lora.rank' of prime-rl: use 'model.lora.rank'",
        ),
        (
            "train.completion_only_loss=true",
            "'completion_only_loss' of TRL: only SFT has a use for 'sft.completion_column': leave "
            "it out",
        ),
        ("train.peft_config=x", "'peft_config' of TRL: use 'model.lora.rank'"),
        ("model.lora_rank=8", "'model.lora_rank' of verl: use 'model.lora.rank'"),
        (
            "actor_rollout_ref.model.lora.merge=true",
            "'actor_rollout_ref.model.lora.merge' of verl: use 'model.lora.merge'",
        ),
        ("train.use_dora=true", f"'use_dora' of TRL, PEFT: {ABSENT}"),
        ("train.lora_dropout=0.1", f"'lora_dropout' of TRL, PEFT: {ABSENT}"),
        ("train.optim=adamw_8bit", "'optim' of TRL, OpenRLHF: use 'train.optimizer'"),
        ("model.lora.r=8", "'lora.r' of PEFT: use 'model.lora.rank'"),
        (
            "model.lora.dropout=0.1",
            f"'model.lora.dropout' of verl, prime-rl, SkyRL: {ABSENT}",
        ),
        ("model.lora.ranks=8", "did you mean 'rank'?"),
        ("model.lora.optimizer=muon", "did you mean 'train.optimizer'?"),
        (
            "orchestrator.algo.type=max_rl",
            "'orchestrator.algo.type' of prime-rl: use 'train.advantage'",
        ),
        (
            "trainer.algorithm.eps_clip_low=0.2",
            "'trainer.algorithm.eps_clip_low' of SkyRL: use 'train.clip_eps_low'",
        ),
        ("actor.adam.lr=1e-6", "'actor.adam.lr' of OpenRLHF: use 'train.learning_rate'"),
        ("generation_kwargs.min_p=0.1", f"'generation_kwargs.min_p' of TRL: {ABSENT}"),
        ('generation_kwargs.stop=["x"]', "'generation_kwargs.stop' of TRL: use 'rollout.stop'"),
        (
            "actor.ppo_mini_batch_size=64",
            "'actor.ppo_mini_batch_size' of verl: not in umbra; nearest is 'train.mini_batches'",
        ),
    ],
)
def test_a_name_is_looked_up_by_its_path(override: str, said: str) -> None:
    assert said_about(override) == said


def test_all_settings_of_a_foreign_section_are_answered() -> None:
    values = MINIMAL | {"data": {"train": "d", "val_files": "e"}, "gconfig": {"n_samples": 4}}

    with pytest.raises(ConfigError) as raised:
        check_config(TrainerConfig, values, "config")

    assert "'data.val_files' of verl: use 'data.eval'" in str(raised.value)
    assert "'gconfig.n_samples' of AReaL: use 'rollout.group_size'" in str(raised.value)


def test_epochs_are_no_epsilon() -> None:
    with pytest.raises(ConfigError, match=r"epochs is unknown; did you mean 'train\.epochs'\?"):
        check_config(TrainerConfig, MINIMAL | {"epochs": 2}, "config")
