"""What a resumed run must share with its earlier starts, besides prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_models import save_model

from umbra.runtime.errors import ConfigError
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.checkpoint.run_dir import BEGAN_AT, record_settings
from umbra.trainer.config.sft_config import SftConfig
from umbra.trainer.config.trainer_config import (
    DataSection,
    ModelSection,
    RewardSection,
    RunSection,
    TrainerConfig,
    TrainSection,
)
from umbra.trainer.services.rollout_start import (
    check_identity,
    instead_of_resuming,
    run_identity,
)
from umbra.trainer.services.services import open_policy_tokenizer
from umbra.trainer.sft.row_preparation import read_rows


def make_config(folder: Path) -> TrainerConfig:
    """A config whose model and reward are in `folder`."""
    if not (folder / "model").exists():
        save_model(folder / "model")
        (folder / "my_rewards.py").write_text("def score(completions): return [0.0]\n")
    return TrainerConfig(
        run=RunSection(dir=folder / "run"),
        model=ModelSection(path=folder / "model"),
        data=DataSection(train=folder / "train.jsonl"),
        reward=RewardSection(function="my_rewards:score"),
        train=TrainSection(steps=1),
    )


def identity_of(config: TrainerConfig) -> Mapping[str, Any]:
    folder = str(config.model.path.parent)
    return run_identity(config, ModelTokenizer.open(config.model.path), [folder])


def notes_of(config: TrainerConfig) -> list[str]:
    """What a resume with this config notes."""
    notes: list[str] = []
    check_identity(config.run.dir, identity_of(config), "do something else", notes.append)
    return notes


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    """Of a run that has been started."""
    config = make_config(tmp_path)
    config.run.dir.mkdir()
    record_settings(config, identity_of(config))
    return config


def test_an_unchanged_run_resumes_without_a_word(config: TrainerConfig) -> None:
    assert notes_of(config) == []


def test_another_order_of_the_prompts_is_refused(config: TrainerConfig) -> None:
    seeded = replace(config, train=replace(config.train, seed=5))
    unshuffled = replace(config, data=replace(config.data, shuffle=False))

    with pytest.raises(ConfigError, match=r"^train.seed is 5 and was 0 when .* do something else"):
        notes_of(seeded)
    with pytest.raises(ConfigError, match=r"^data.shuffle is false and was true when the run beg"):
        notes_of(unshuffled)


@pytest.mark.parametrize("changed", ["tokenizer", "chat template"])
def test_another_tokenizer_or_chat_template_is_refused(config: TrainerConfig, changed: str) -> None:
    path = config.model.path / "tokenizer.json"
    if changed == "chat template":
        path = config.model.path / "tokenizer_config.json"
    content = json.loads(path.read_text())
    if changed == "chat template":
        content["chat_template"] += " "
    else:
        content["model"]["vocab"]["~"] = 50
    path.write_text(json.dumps(content))

    with pytest.raises(ConfigError, match=f"^model.path: the {changed} is not the one"):
        notes_of(config)


def test_a_chat_template_with_the_date_has_the_day_on_which_the_run_began(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    path = config.model.path / "tokenizer_config.json"
    date = "{{ strftime_now('%d') }}{{ strftime_now( \"%Y\" ) }}"
    template = date + "{% for message in messages %}{{ message.content }}{% endfor %}"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    config.run.dir.mkdir()
    record_settings(config, {BEGAN_AT: "2001-01-30T23:59:59"})
    sft = SftConfig(run=config.run, model=config.model, data=config.data, train=config.train)
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    config.data.train_files[0].write_text(json.dumps({"messages": messages}))

    tokenizer = open_policy_tokenizer(config)
    rows = read_rows(sft, print)["train"]

    assert tokenizer.render_chat(messages[:1], {}) == "3020011+1"
    assert rows.tokens.tolist() == tokenizer.encode("3020011+12")
    assert identity_of(config)[BEGAN_AT] == "2001-01-30T23:59:59"


def test_a_changed_reward_function_is_noted(config: TrainerConfig) -> None:
    (config.model.path.parent / "my_rewards.py").write_text("def score(completions): return [1]\n")

    (note,) = notes_of(config)

    assert note.startswith("warning: the reward (its settings, or the file of a function) changed")


def test_a_changed_overlong_penalty_is_noted_like_a_changed_reward(config: TrainerConfig) -> None:
    shaped = replace(config, reward=replace(config.reward, overlong_buffer=64))

    (note,) = notes_of(shaped)

    assert note.startswith("warning: the reward (its settings, or the file of a function) changed")


def test_the_remedy_names_the_checkpoint_to_begin_a_new_run_from(tmp_path: Path) -> None:
    assert instead_of_resuming(tmp_path) == (
        "begin a new run (run.resume = 'never' and run.overwrite = true, or another run.dir)"
    )
    checkpoint = tmp_path / "checkpoints/step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()

    assert instead_of_resuming(tmp_path).endswith(f"and run.resume = '{checkpoint}'")
