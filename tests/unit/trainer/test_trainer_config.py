"""The config file, and the errors about a wrong one."""

from __future__ import annotations

import math
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from minimal_config import MINIMAL
from model_folders import write_model_folder

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.errors import ConfigError, SettingError
from umbra.runtime.rollout.rollout_config import RolloutConfig, WorkerConfig
from umbra.runtime.settings import from_wire, to_wire
from umbra.trainer.config.config_file import check_config, load_config
from umbra.trainer.config.trainer_config import (
    DataSection,
    RewardSection,
    ServeConfig,
    TrainerConfig,
)
from umbra.trainer.data.prompt_preparation import PromptFiles
from umbra.trainer.services.services import manager_spec, worker_specs
from umbra.trainer.serving.served_config import served_pools

TOML = """
[model]
path = "models/tiny"
[data]
train = "train.jsonl"
[reward]
function = "rewards:score"
[train]
steps = 10
betas = [0.9, 0.95]
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(TOML)
    return path


def test_a_minimal_config_gets_defaults(config_file: Path) -> None:
    config = load_config(config_file)

    assert config.train.steps == 10
    assert config.train.betas == (0.9, 0.95)
    assert config.pool.engine == "auto"
    assert config.model.path == Path("models/tiny")
    assert config.master_dtype == "float32"


def test_overrides_win_and_keep_text_as_text(config_file: Path) -> None:
    overrides = ["train.steps=3", "run.dir=2024", "pool.engine=echo", "data.eval=held/out.jsonl"]

    config = load_config(config_file, [*overrides, "pool.engine_args={vocab_size=64}"])

    assert config.train.steps == 3
    assert config.run.dir == Path("2024")
    assert config.pool.engine == "echo"
    assert config.data.eval == Path("held/out.jsonl")
    assert config.pool.engine_args == {"vocab_size": 64}


def test_the_settings_of_agent_loops_and_rewards_reach_the_manager(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 64, "max_position_embeddings": 128}')
    agent = {
        "agent_concurrency": 7, "agent_timeout_s": 5.0, "agent_retries": 3, "max_failed_share": 0.5,
    }  # fmt: skip
    rollout = {"agent": "loops:run", **agent}
    values = {**MINIMAL, "model": {"path": str(tmp_path)}, "rollout": rollout}
    functions = {"short": "rewards:short", "exact": "rewards:exact"}
    values["reward"] = {"functions": functions, "overlong_buffer": 16, "overlong_penalty": 0.5}
    config = check_config(TrainerConfig, values, "config", ["train.advantage=gdpo"])
    files = PromptFiles(train_path=tmp_path, num_train=1, eval_path=None, num_eval=0)

    spec = from_wire(ActorSpec, to_wire(manager_spec(config, files, [3], 1, "cpu", 3, Path("run"))))
    found = from_wire(RolloutConfig, spec.kwargs["config"])

    assert found.settings == replace(config.rollout, stop_token_ids=(3,))
    assert found.dispatch.max_context_len == 128
    assert found.worker_names == ("worker-0", "worker-1", "worker-2")
    assert (found.overlong_buffer, found.overlong_penalty) == (16, 0.5)
    assert found.reward_parts == ("short", "exact", "overlong")


def test_the_settings_of_texts_reach_workers_and_servers(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    pool = {"model_path": str(folder), "chat_template_kwargs": {"enable_thinking": False}}
    values: dict[str, Any] = {
        **MINIMAL,
        "model": {"path": str(folder)},
        "data": {**MINIMAL["data"], "chat_template_kwargs": {"short": True}},
        "rollout": {"skip_special_tokens": True},
        "pools": {"judge": pool},
    }
    config = check_config(TrainerConfig, values, "config")

    (spec,) = worker_specs(config, 1, tmp_path / "run")
    kwargs = from_wire(ActorSpec, to_wire(spec)).kwargs
    worker = from_wire(WorkerConfig, kwargs["config"])
    judge = worker.pools["judge"]
    served = served_pools(check_config(ServeConfig, values, "config"))

    assert (worker.skip_special_tokens, judge.skip_special_tokens) == (True, True)
    variables = [worker.chat_template_kwargs, judge.chat_template_kwargs]
    assert variables == [{"short": True}, {"enable_thinking": False}]
    assert [pool.template_variables for pool in served] == variables


def test_a_pool_names_its_adapters(config_file: Path) -> None:
    adapters = ["pool.lora_adapters={user='adapters/user'}", "pools.judge.lora_adapters.strict=s"]
    judge = ["pools.judge.model_path=m", "pools.judge.engine=vllm", "pool.engine=vllm"]

    config = load_config(config_file, [*adapters, *judge])

    assert config.pool.lora_adapters == {"user": Path("adapters/user")}
    assert config.pools["judge"].lora_adapters == {"strict": Path("s")}


@pytest.mark.parametrize("engine", ["embedded", "echo", "sglang"])
def test_an_engine_without_adapters_is_an_error_before_a_start(
    config_file: Path, engine: str
) -> None:
    with pytest.raises(ConfigError, match=f"pool: lora_adapters: engine '{engine}' has no LoRA"):
        load_config(config_file, [f"pool.engine={engine}", "pool.lora_adapters={a='x'}"])


@pytest.mark.parametrize(("given", "count"), [("auto", "auto"), ("'auto'", "auto"), ("3", 3)])
def test_a_number_of_engines_is_set_or_left_to_the_gpus(
    config_file: Path, given: str, count: int | str
) -> None:
    assert load_config(config_file).pool.count == "auto"
    assert load_config(config_file, [f"pool.count={given}"]).pool.count == count


def test_an_override_may_make_a_new_section(config_file: Path) -> None:
    assert load_config(config_file, ["rollout.group_size=4"]).rollout.group_size == 4


def test_data_may_be_a_file_or_a_list_of_files(config_file: Path) -> None:
    def data_of(*overrides: str) -> DataSection:
        return load_config(config_file, overrides).data

    several = data_of('data.train=["a.jsonl", "b.parquet"]', 'data.eval=["c.jsonl"]')

    assert several.train_files == (Path("a.jsonl"), Path("b.parquet"))
    assert several.eval_files == (Path("c.jsonl"),)
    assert from_wire(DataSection, to_wire(several)) == several
    one = data_of("data.train=a.jsonl")
    assert (one.train_files, one.eval_files) == ((Path("a.jsonl"),), ())
    assert from_wire(DataSection, to_wire(one)) == one
    with pytest.raises(ConfigError, match=r"data.train.*the list is empty: name at least one file"):
        data_of("data.train=[]")
    with pytest.raises(ConfigError, match=r"data.train.*holds a NUL character"):
        data_of('data.train=["a.jsonl", "b\u0000"]')


def test_ones_own_estimator_may_do_with_one_completion_for_each_prompt(config_file: Path) -> None:
    own = ["train.advantage=my_estimators:raw", "rollout.group_size=1"]

    assert load_config(config_file, own).rollout.group_size == 1


def _with_much_set(folder: Path) -> Path:
    path = folder / "much.toml"
    path.write_text(
        TOML.replace("[reward]", 'eval = "eval.jsonl"\n[reward]')
        + """
[run]
name = "first"
[rollout]
agent = "loops:run"
stop_token_ids = [3]
[pool]
engine = "vllm"
lora_adapters = {user = "adapters/user"}
engine_args = {tensor_parallel_size = 2, compilation_config = {level = 0}}
[pools.judge]
model_path = "models/judge"
env = {CUDA_VISIBLE_DEVICES = "1"}
[pools.other]
model_path = "models/other"
"""
    )
    return path


def test_an_empty_value_unsets_what_need_not_be_there(tmp_path: Path) -> None:
    unset = ["data.eval=", "rollout.agent= ", "run.name=", "rollout.stop_token_ids="]
    entries = ["pool.lora_adapters.user=", "pool.engine_args.tensor_parallel_size="]
    nested = ["pool.engine_args.compilation_config.level=", "pools.other="]

    config = load_config(_with_much_set(tmp_path), [*unset, *entries, *nested])

    assert config.data.eval is None
    assert config.rollout.agent is None
    assert (config.run.name, config.run_name) == ("", config.run.dir.name)
    assert config.rollout.stop_token_ids == ()
    assert config.pool.lora_adapters == {}
    assert config.pool.engine_args == {"compilation_config": {}}
    assert list(config.pools) == ["judge"]


def test_the_last_of_several_values_for_a_setting_counts(config_file: Path) -> None:
    assert load_config(config_file, ["data.eval=a.jsonl", "data.eval="]).data.eval is None
    assert load_config(config_file, ["data.eval=", "data.eval=a.jsonl"]).data.eval == Path(
        "a.jsonl"
    )
    assert load_config(config_file, ["train.steps=many", "train.steps=3"]).train.steps == 3


def test_nothing_is_made_by_unsetting_what_is_not_there(config_file: Path) -> None:
    unset = ["rollout.agent=", "pools.judge.max_wait_s=", "pool.engine_args.a.b="]

    assert load_config(config_file, unset) == load_config(config_file)


def test_an_engines_variable_may_be_empty(tmp_path: Path) -> None:
    config = load_config(_with_much_set(tmp_path), ["pools.judge.env.CUDA_VISIBLE_DEVICES="])

    assert config.pools["judge"].env == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    "override",
    ["train.seed=", "model.path=", "data.prompt_column=", "pool.engine= ", "model.dtype="],
)
def test_what_has_to_be_there_cannot_be_unset(config_file: Path, override: str) -> None:
    key = override.partition("=")[0]

    with pytest.raises(ConfigError, match=f"^{key}= .command line.: {key} cannot be unset"):
        load_config(config_file, [override])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["rollout.group_size=abc"],
            "rollout.group_size=abc (command line): input should be a valid integer, got 'abc'",
        ),
        (
            ["pool.count=2", "pool.count=-1"],
            "pool.count=-1 (command line): use 0 or more, or 'auto'",
        ),
        (
            ["run.metrics_address=::1:9464"],
            "run.metrics_address=::1:9464 (command line): an address is written as HOST:PORT, "
            "got '::1:9464'",
        ),
        (["train.betas=[0.9, 1.5]"], "train.betas=[0.9, 1.5] (command line): train.betas.1: input"),
        (["trian.steps=3"], "trian.steps=3 (command line): trian is unknown"),
        (
            ["pool.staged_updates=true", "pool.count=3", "train.steps=3"],
            "pool.staged_updates=true (command line): pool: staged_updates is for mode",
        ),
        (
            ["pool.sleep=all", "pool.mode=standalone"],
            "pool.sleep=all pool.mode=standalone (command line): pool: sleep is for mode 'hybrid'",
        ),
        (
            ["pool.engine=vllm", "pool.sleep=weights"],
            "pool.engine=vllm pool.sleep=weights (command line): pool: sleep 'weights' is for",
        ),
        (
            ["train.offload=all", "train.steps=3", "pool.mode=standalone"],
            "train.offload=all pool.mode=standalone (command line): train.offload = 'all' and",
        ),
        (
            ["train.advantage=gdpo", "reward.function=", "reward.functions="],
            "train.advantage=gdpo reward.function= (command line): reward.function = None and",
        ),
        (["pools.judge.count=2"], "pools.judge.count=2 (command line): pools.judge.model_path is"),
        (
            ["pools.judge.env.HF_TOKEN=hf_abc"],
            "pools.judge.env.HF_TOKEN=*** (command line): pools.judge.model_path is missing",
        ),
        (
            ["pools.judge.engine_args.hf_token=hf_abc"],
            "pools.judge.engine_args.hf_token=*** (command line): pools.judge.model_path is",
        ),
        (["pools.a-b.model_path=m"], "pools.a-b.model_path=m (command line): pools.a-b: name a"),
    ],
)
def test_an_error_of_the_command_line_names_the_command_line_alone(
    config_file: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(config_file, overrides)

    assert str(raised.value).startswith(said)
    assert "config.toml" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"run.{name}", '"a\\u0000b"') for name in ("dir", "resume")),
        ("model.path", '"a\\u0000b"'),
        *((f"data.{name}", '"a\\u0000b"') for name in ("train", "eval")),
        ("reward.python_path", '["a\\u0000b"]'),
        ("pool.lora_adapters.x", '"a\\u0000b"'),
        ("pools.judge.model_path", '"a\\u0000b"'),
        ("pools.judge.env.A", '"a\\u0000b"'),
    ],
)
def test_a_nul_in_a_path_is_refused_wherever_it_is_given(
    tmp_path: Path, key: str, value: str
) -> None:
    """Also in a variable for engines: the system takes neither."""
    path = tmp_path / "config.toml"
    path.write_text(TOML + '[pools.judge]\nmodel_path = "m"\n[pool]\nengine = "vllm"\n')
    said = r".*(a\\x00b'|the value of A) holds a NUL character: remove it"

    shown = "***" if ".env." in key else value
    with pytest.raises(ConfigError, match=re.escape(f"{key}={shown} (command line): ") + said):
        load_config(path, [f"{key}={value}"])

    content = tomllib.loads(path.read_text())
    *sections, name = key.split(".")
    table = content
    for section in sections:
        table = table.setdefault(section, {})
    table[name] = tomllib.loads(f"value = {value}")["value"]
    with pytest.raises(ConfigError, match=f"config: {'.'.join(sections)}.*{said}"):
        check_config(TrainerConfig, content, "config")


def test_a_setting_that_is_not_utf_8_is_refused(config_file: Path) -> None:
    given = os.fsdecode(b"run.dir=\xff")

    with pytest.raises(ConfigError, match=r"override 'run.dir=\\udcff': not UTF-8; write it in"):
        load_config(config_file, [given])


def test_errors_of_file_and_command_line_name_their_source(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(TOML.replace("steps = 10", "steps = 0") + "[pools.judge]\ncount = 1\n")

    with pytest.raises(ConfigError) as raised:
        load_config(path, ["pool.count=-1", "pools.judge.dtype=float32"])

    assert str(raised.value) == (
        "pool.count=-1 (command line): use 0 or more, or 'auto', got -1\n"
        f"{path}: pools.judge.model_path is missing\n"
        f"{path}: train.steps: input should be greater than or equal to 1, got 0"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=3", ["train.stepz is unknown; did you mean 'steps'? (docs/configuration.md"]),
        ("trian.steps=3", ["trian is unknown", "did you mean 'train'?"]),
        ("rollout.min_lr_ratio=1", ["is unknown; did you mean 'train.min_lr_ratio'?"]),
        (
            "rollout.learning_rates=1",
            ["did you mean 'train.learning_rate' or 'critic.learning_rate'?"],
        ),
        ("rollout.device=cpu", ["did you mean 'pool.device' or 'train.device'?"]),
        ("pool.timeout_s=1", ["pool.timeout_s is unknown; did you mean 'sync_timeout_s'?"]),
        ("train.ema_decay=0.9", ["train.ema_decay is unknown; did you mean 'ema'?"]),
        ("pools.judge.path=x", ["pools.judge.path is unknown; did you mean 'model_path'?"]),
        ("train.clip_eps=1", ["did you mean 'clip_eps_low' or 'clip_eps_high' or 'eps'?"]),
        ("train.advantages=1", ["did you mean 'advantage' or 'advantage_norm'?"]),
        ("train.colour=1", ["train.colour is unknown (docs/configuration.md lists all)"]),
        ("model.dytpe=float32", ["model.dytpe is unknown", "did you mean 'dtype'"]),
        ("train.steps=many", ["train.steps", "integer", "'many'"]),
        ("train.steps=0", ["train.steps", "greater than or equal to 1"]),
        ("train.steps=2.5", ["train.steps", "integer", "2.5"]),
        ("train.learning_rate=true", ["train.learning_rate", "number", "True"]),
        ("train.learning_rate=nan", ["train.learning_rate", "finite"]),
        ("train.advantage=grop", ["train.advantage", "'grpo', 'dr_grpo'", "did you mean 'grpo'"]),
        ("train.loss=decoupeld", ["'clipped', 'decoupled'", "did you mean 'decoupled'"]),
        ("train.loss=my-losses:mine", ["train.loss", "'module:function'", "'my-losses:mine'"]),
        ("train.importance_cap=0.5", ["train.importance_cap", "greater than or equal to 1"]),
        ("train.importance_cap=inf", ["train.importance_cap", "finite"]),
        ("train.importance_floor=1", ["train.importance_floor", "less than 1"]),
        ("train.importance_above_cap=drop", ["'truncate' or 'mask'"]),
        ("model.dtype=float16", ["model.dtype", "'float32', 'bfloat16' or 'float64'"]),
        ("train.betas=[0.9, 1.5]", ["train.betas.1", "less than 1"]),
        ("reward.function=score", ["reward.function", "'module:function'"]),
        ("rollout.top_k=-1", ["(command line): use 1 or more, or 0 for all tokens, got -1"]),
        (
            "reward.function=",
            [
                "reward.function = None and reward.functions = {} and train.advantage = 'grpo': ",
                "set reward.function, or",
            ],
        ),
        (
            "reward.functions.exact=rewards:exact",
            ["reward.function = '", "set reward.function, or reward.functions for several"],
        ),
        ("reward.functions.exact=exact", ["reward.functions.exact", "'module:function'"]),
        ("reward.overlong_penalty=0", ["reward.overlong_penalty", "greater than 0"]),
        ("reward.weights.exact=1", ["reward: weights: exact is none of functions (none)"]),
        (
            "pool.engine=embeded",
            ["pool.engine", "'embedded', 'vllm', 'sglang', 'echo', 'faulty' or the 'module:Class'"],
        ),
        ("pool.transport=nccl", ["pool.transport", "'auto', 'cuda_ipc', 'memfd' or 'tcp'"]),
        ("pool.full_sync_every=0", ["pool.full_sync_every", "greater than or equal to 1"]),
        (
            "pool.staged_updates=true",
            ["pool: staged_updates is for mode 'standalone'", "leave it out, or set mode to"],
        ),
        ("train=3", ["train=3 (command line): should be a section, got 3"]),
        ("train.steps", ["section.key=value"]),
        ("train.steps.more=3", ["steps is a value, not a section"]),
    ],
)
def test_a_wrong_setting_names_key_and_what_is_allowed(
    config_file: Path, override: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(config_file, [override])

    for text in said:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    ("key", "lowest", "below"),
    [
        ("train.steps", 1, 0),
        ("train.seed", 0, -1),
        ("pool.count", 0, -1),
        ("pool.sync_timeout_s", 1e-6, 0),
        ("train.ema", 0, -1e-6),
    ],
)
def test_the_lowest_value_of_a_kind_is_allowed_and_none_below(
    config_file: Path, key: str, lowest: float, below: float
) -> None:
    load_config(config_file, [f"{key}={lowest}"])

    with pytest.raises(ConfigError, match=key):
        load_config(config_file, [f"{key}={below}"])


def test_only_the_network_gives_reason_not_to_send_all_weights(config_file: Path) -> None:
    given = ["pool.full_sync_every=8"]

    assert load_config(config_file, given).pool.full_sync_every == 8
    with pytest.raises(ConfigError, match="full_sync_every 8 is for transport 'tcp', not 'memfd'"):
        load_config(config_file, [*given, "pool.transport=memfd"])


@pytest.mark.parametrize(
    ("epochs", "num_prompts", "groups_per_step", "steps"),
    [
        (1, 64, 8, 8),
        (2, 64, 8, 16),
        (1, 65, 8, 9),
        (0.5, 64, 8, 4),
        (0.1, 5, 8, 1),
        (1.1, 10, 1, 11),
    ],
)
def test_passes_over_the_prompts_become_steps(
    config_file: Path, epochs: float, num_prompts: int, groups_per_step: int, steps: int
) -> None:
    overrides = ["train.steps=", f"train.epochs={epochs}", "train.warmup_ratio=0.1"]
    config = load_config(config_file, [*overrides, f"rollout.groups_per_step={groups_per_step}"])

    train = config.with_steps(num_prompts).train

    assert train.total_steps == steps
    assert train.num_warmup_steps == math.ceil(steps / 10)
    assert load_config(config_file).with_steps(num_prompts).train.total_steps == 10


def test_passes_that_a_critic_s_warm_up_takes_whole_are_refused(config_file: Path) -> None:
    given = ["train.steps=", "train.epochs=1", "train.advantage=gae", "critic.warmup_steps=4"]
    config = load_config(config_file, [*given, "rollout.groups_per_step=10"])

    with pytest.raises(ConfigError, match=r"critic.warmup_steps is 4, .* 1.0 are 4 steps: "):
        config.with_steps(40)

    assert config.with_steps(41).train.total_steps == 5


def test_auxiliary_pools_have_names_of_their_own(config_file: Path) -> None:
    judge = "pools.judge.model_path=models/judge"

    config = load_config(config_file, [judge, "pools.judge.count=2", "pools.Rm_2.model_path=rm"])

    assert {name: pool.count for name, pool in config.pools.items()} == {"judge": 2, "Rm_2": "auto"}
    assert config.pools["judge"].model_path == Path("models/judge")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["pools.judge.count=2"], ["pools.judge.model_path is missing"]),
        (["pools.policy.model_path=m"], ["pools.policy: this name is taken", "section [pool]"]),
        (["pools.worker.model_path=m"], ["pools.worker: this name is taken; choose another one"]),
        (["pools.a-b.model_path=m"], ["pools.a-b", "letters, digits and '_' only"]),
        (
            ["pools.judge.model_path=m", "pools.judge.cuont=2"],
            ["pools.judge.cuont is unknown", "did you mean 'count'?"],
        ),
        (
            ["pools.judge.model_path=m", "pools.judge.temperature=1"],
            ["pools.judge.temperature is unknown (docs/con"],
        ),
        (
            ["pools.judge.model_path=m", "pools.judge.mode=hybrid"],
            ["pools.judge.mode", "'colocated' or 'standalone'"],
        ),
        (
            ["pools.j.model_path=m", "pools.j.mode=standalone", "pools.j.max_wait_s=1"],
            ["pools.j: max_wait_s is for mode 'colocated'", "leave it out, or set mode to"],
        ),
        (
            [
                "pools.judge.model_path=m",
                "pools.judge.engine=embedded",
                "pools.judge.lora_adapters.a=x",
            ],
            ["pools.judge: lora_adapters: engine 'embedded' has no", "use engine 'vllm'"],
        ),
        (
            ["pools.judge.model_path=m", "pools.judge.max_turn_s=0"],
            ["pools.judge.max_turn_s", "greater than 0"],
        ),
    ],
)
def test_a_wrong_auxiliary_pool_is_an_error_with_its_remedy(
    config_file: Path, overrides: list[str], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(config_file, overrides)

    for text in said:
        assert text in str(raised.value)
    assert f"{overrides[-1]} (command line): " in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.steps=0", "pool.count=-1"], ["pool.count=-1", "train.steps=0"]),
        (
            # unknown, out of range, refused by its section, and a refused combination
            ["train.lr=1", "train.ema=-1", "pool.sleep=all", "rollout.top_k=1"],
            ["train.ema=-1", "train.lr=1", "pool.sleep=all", "rollout.top_k=1"],
        ),
        (["train.betas=[2, 2]", "data.trian=x"], ["data.trian", "train.betas", "train.betas"]),
        (["train.steps", "train.ema=-1"], ["override 'train.steps'", "train.ema=-1"]),
        (["train.loss=x", "train.dual_clip=0.5"], ["train.loss=x", "train.dual_clip=0.5"]),
        # What follows from another problem is none of its own.
        (["reward.function=3:x"], ["reward.function=3:x"]),
        (["rewards.function=a:b", "reward.function="], ["rewards.function=a:b"]),
        (['model.path="a\\u0000b"'], ['model.path="a']),
        (["pools.judge.model_path="], ["pools.judge.model_path= "]),
        (["pool.gpus=[-1]", "pool.sleep=all"], ["pool.gpus=[-1]", "pool.sleep=all"]),
    ],
)
def test_all_wrong_settings_are_named_at_once(
    config_file: Path, overrides: list[str], said: list[str]
) -> None:
    standalone = "pool.mode=standalone"

    with pytest.raises(ConfigError) as raised:
        load_config(config_file, [standalone, *overrides])

    lines = str(raised.value).splitlines()
    assert len(lines) == len(said), lines
    for line, start in zip(sorted(lines), sorted(said), strict=True):
        assert line.removeprefix(f"{standalone} ").startswith(start), lines


def test_a_missing_setting_is_named() -> None:
    values = {name: table for name, table in MINIMAL.items() if name != "model"}

    with pytest.raises(ConfigError, match=r"section \[model\] is missing"):
        check_config(TrainerConfig, values, "config")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": 3}, "model: should be a section, got 3"),
        ({"pools": [3]}, "pools: should be a table, got a list"),
        ({"pools": {"judge": 3}}, "pools.judge: should be a section, got 3"),
        ({"model": {"path": 3}}, "model.path: should be text, got 3"),
        ({"pool": {"count": {"x": 3}}}, "pool.count: use 0 or more, or 'auto', got a table"),
        ({"pool": {"gpus": ["1"]}}, "pool.gpus.0: input should be a valid integer, got '1'"),
        ({"train": {"steps": 1, "betas": 3}}, "train.betas: should be a list in brackets, got 3"),
    ],
)
def test_a_wrong_type_is_named_without_words_of_python(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"config: {said}") + "$"):
        check_config(TrainerConfig, MINIMAL | values, "config")


def test_a_setting_in_place_of_the_config_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the config file comes before settings"):
        load_config(tmp_path / "pool.count=2", ["config.toml"])


def test_a_missing_file_names_its_absolute_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path / "none.toml")):
        load_config(tmp_path / "none.toml")


def test_a_setting_outside_of_any_section_is_explained() -> None:
    with pytest.raises(
        ConfigError, match=r"config: group_size is unknown; .* 'rollout.group_size'"
    ):
        check_config(TrainerConfig, {"group_size": 8, **MINIMAL}, "config")


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[train]\nsteps =\n")

    with pytest.raises(ConfigError, match="line 2"):
        load_config(path)


def test_master_dtype_follows_float64() -> None:
    double = check_config(
        TrainerConfig, MINIMAL | {"model": {"path": "m", "dtype": "float64"}}, "config"
    )
    half = check_config(
        TrainerConfig, MINIMAL | {"model": {"path": "m", "dtype": "bfloat16"}}, "config"
    )

    assert (double.master_dtype, half.master_dtype) == ("float64", "float32")


def test_a_reward_function_does_not_have_the_name_of_the_overlong_penalty() -> None:
    functions = {"overlong": "rewards:short"}
    RewardSection(functions=functions)

    with pytest.raises(SettingError, match=r"^functions: 'overlong' is the penalty's name: use"):
        RewardSection(functions=functions, overlong_buffer=9)


def test_gdpo_compares_all_parts_of_rewards_by_their_weights() -> None:
    functions = {"exact": "rewards:exact", "short": "rewards:short"}
    reward = {"functions": functions, "weights": {"short": 0.2}, "overlong_buffer": 9}
    values = {**MINIMAL, "reward": {**reward, "overlong_penalty": 3.0}}

    config = check_config(TrainerConfig, values, "config", ["train.advantage=gdpo"])

    assert config.compared_parts == {"exact": 1.0, "short": 0.2, "overlong": 3.0}
    assert replace(config, train=replace(config.train, advantage="grpo")).compared_parts == {}
