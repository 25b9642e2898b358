"""Checkpoints and exports, written and read by real ranks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked_ranks import start_fork
from rank_programs import run_all
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from training_models import make_model, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.errors import ConfigError
from umbra.runtime.settings import to_wire
from umbra.runtime.testing.distributed_world import DistributedWorld
from umbra.trainer.checkpoint.checkpoint_store import StoredParameters
from umbra.trainer.checkpoint.file_digests import complete
from umbra.trainer.checkpoint.model_export import export_checkpoint
from umbra.trainer.checkpoint.trainer_state import complete_checkpoints, read_trainer_state
from umbra.trainer.config.trainer_config import ModelSection
from umbra.trainer.model.stored_weights import StoredWeights
from umbra.trainer.world.run_files import RunDirectoryError

pytestmark = [pytest.mark.process, pytest.mark.slow]


SMALL_EXPERTS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Ran:
    """Results of calls of two ranks in `folder`, then of one, by rank and name of the call."""

    folder: Path
    two: list[dict[str, Any]]
    one: dict[str, Any]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: None) -> Ran:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in ("qwen3", "llama"):
        save_model(folder / kind, kind)
        (folder / f"{kind}-export").mkdir()
        (folder / f"{kind}-export" / "old").write_text("")
    routed = make_model(
        "deepseek-v3",
        first_k_dense_replace=0,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
    )
    for buffer in choices_of_experts(routed.state_dict()).values():
        torch.nn.init.normal_(buffer, std=3.0)
    routed.save_pretrained(folder / "routed")
    (folder / "many" / "step-000003").mkdir(parents=True)
    (folder / "many" / "step-000003" / "__0_0.distcp").write_bytes(b"half")
    (folder / "best kept").mkdir()
    (folder / "best kept" / "best").symlink_to("step-000010")
    (folder / "file").write_text("")
    place = str(folder)
    two_ranks = {
        "save": ["save_after_two_steps", f"{place}/saved"],
        "average": ["save_average", f"{place}/averaged"],
        "damaged": ["load_damaged", f"{place}/saved/step-000002", f"{place}/damaged-copies"],
        "flipped": ["find_flipped_bits", f"{place}/saved/step-000002", f"{place}/flipped"],
        "many": ["save_many", f"{place}/many", [999_990, 1_000_000, 1_000_010], 2],
        "adapters": ["load_other_adapters", f"{place}/adapters"],
        "blocked": ["fail_to_save", f"{place}/file/checkpoints"],
        "qwen3": ["export_model", f"{place}/qwen3", f"{place}/qwen3-export", "float32"],
        "llama": ["export_model", f"{place}/llama", f"{place}/llama-export", "float32"],
    }
    one_rank = {
        "load": ["load_checkpoint", f"{place}/saved/step-000002"],
        "misfit": ["load_into_another_model", f"{place}/saved/step-000002"],
        "half": ["export_model", f"{place}/qwen3", f"{place}/half-export", "bfloat16"],
        "routed": ["export_model", f"{place}/routed", f"{place}/routed-export", "bfloat16"],
        "merged": ["export_merged", f"{place}/qwen3", f"{place}/merged"],
        "beside": ["export_beside_leftovers", f"{place}/qwen3", f"{place}/beside"],
        "unused": ["save_and_load_with_an_unused_parameter", f"{place}/unused"],
        "given up": ["save_many", f"{place}/back", [10, 20, 30, 40], 4],
        "back": ["save_many", f"{place}/back", [15, 17], 1],
        "best": ["save_many", f"{place}/best kept", [10, 20, 30], 1],
        "first": ["save_many", f"{place}/anew", [1, 2], 2],
        "anew": ["save_anew_cut_short", f"{place}/anew", 2],
    }
    run = DistributedWorld(tmp_path_factory.mktemp("worlds"), start_fork)
    return Ran(
        folder,
        run(run_all, two_ranks, num_ranks=2, timeout_s=120.0),
        run(run_all, one_rank, num_ranks=1, timeout_s=120.0)[0],
    )


def test_what_two_ranks_saved_one_rank_loads_bit_for_bit(ran: Ran) -> None:
    before = ran.two[0]["save"]
    state, after = ran.one["load"]

    numbers = {"step": 2, "version": 7, "world_size": 2, "seed": 0}
    assert state == {**numbers, "ledger": "1-0-512", "lora": {}, "base": ""}
    assert before.keys() == after.keys()
    assert any(name.endswith("exp_avg_sq") for name in before)
    for name, array in before.items():
        assert np.array_equal(array, after[name]), name


def test_a_parameter_that_the_model_does_not_use_is_no_obstacle(ran: Ran) -> None:
    assert all(ran.one["unused"])


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(ran: Ran) -> None:
    assert ran.one["misfit"].startswith("ConfigError: checkpoint")
    misfit = r"of another model than .+: model.lm_head.weight is missing there and .+; name the"
    assert re.search(misfit, ran.one["misfit"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("fewer", "set model.lora to {'rank': 2, 'alpha': 32.0, 'targets': ['q_proj', 'v_proj'],"),
        ("more", "set model.lora to {'rank': 2, 'alpha': 32.0, 'targets': ['q_proj', 'v_proj'],"),
        ("scale", "set model.lora to {'rank': 2, 'alpha': 32.0, 'targets': ['q_proj', 'v_proj'],"),
        ("base", "were trained on other weights than those in model.path"),
        ("none", "set model.lora to {'rank': 2, 'alpha': 32.0, 'targets': ['q_proj', 'v_proj'],"),
    ],
)
def test_adapters_are_loaded_where_they_belong(ran: Ran, other: str, words: str) -> None:
    for of_rank in ran.two:
        assert words in of_rank["adapters"][other]
        assert of_rank["adapters"]["same"] == of_rank["adapters"]["reordered"] == ""


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "trainer.json"])
@pytest.mark.parametrize("damage", ["halved", "emptied", "removed"])
def test_a_damaged_file_is_named_on_every_rank_with_cause_and_remedy(
    ran: Ran, name: str, damage: str
) -> None:
    one, other = (rank["damaged"][f"{name} {damage}"] for rank in ran.two)

    assert one == other
    place, _, rest = one.partition(": ")[2].partition(": ")
    assert place.startswith(f"cannot read {name} of the checkpoint /")
    cause, _, remedy = rest.partition("; ")
    assert cause == "No such file or directory" if damage == "removed" else cause
    # `umbra eval`, `export` and `replay` raise this, too.
    assert remedy == "if the checkpoint is damaged, restore it from a backup, or name another one"


def test_changed_bytes_are_noticed_on_every_rank(ran: Ran) -> None:
    one, other = (dict(rank["flipped"]) for rank in ran.two)

    assert one == other
    assert one.pop("intact") == ""
    assert len(one) == 4
    for name, damage in one.items():
        assert damage.startswith(f"{name} changed since it was written")


def test_a_checkpoint_with_changed_bytes_is_not_exported(ran: Ran, tmp_path: Path) -> None:
    section = ModelSection(path=ran.folder / "qwen3")
    copy = ran.folder / "flipped" / "__1_0.distcp"

    with pytest.raises(RunDirectoryError, match=r"damaged: __1_0.distcp changed since it was"):
        export_checkpoint(section, copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_incomplete_checkpoint_is_refused_by_name(ran: Ran, tmp_path: Path) -> None:
    copy = tmp_path / "step-000002"
    copy.mkdir()
    for file in (ran.folder / "saved" / "step-000002").iterdir():
        if file.name != "COMPLETE":
            (copy / file.name).write_bytes(file.read_bytes())

    with pytest.raises(ConfigError, match="step-000002 is incomplete"):
        read_trainer_state(copy)
    with pytest.raises(ConfigError, match="step-000099 does not exist"):
        read_trainer_state(tmp_path / "step-000099")
    assert complete_checkpoints(tmp_path) == []


def test_the_newest_checkpoints_stay_and_rests_of_interrupted_saves_go(ran: Ran) -> None:
    folder = ran.folder / "many"

    newest = ["step-1000000", "step-1000010"]
    assert sorted(path.name for path in folder.iterdir()) == newest
    assert [path.name for path in complete_checkpoints(folder)] == newest


def test_the_best_checkpoint_stays_beside_the_newest(ran: Ran) -> None:
    found = [path.name for path in complete_checkpoints(ran.folder / "best kept")]

    assert found == ["step-000010", "step-000030"]


def test_a_new_checkpoint_stays_beside_later_ones_of_a_discarded_history(ran: Ran) -> None:
    found = [path.name for path in complete_checkpoints(ran.folder / "back")]

    assert found == ["step-000017", "step-000020", "step-000030", "step-000040"]


def test_a_checkpoint_that_is_half_replaced_is_not_complete(ran: Ran) -> None:
    assert "cut short" in ran.one["anew"]
    found = complete_checkpoints(ran.folder / "anew")
    assert [path.name for path in found] == ["step-000001"]


def test_saving_where_nothing_can_be_written_is_an_error_on_every_rank(ran: Ran) -> None:
    one, other = (rank["blocked"] for rank in ran.two)

    assert one == other
    assert one.startswith("RunDirectoryError: cannot prepare the checkpoint")
    assert "a part of that path is a file" in one


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_an_export_is_the_same_model_to_transformers(ran: Ran, kind: str) -> None:
    target = ran.folder / f"{kind}-export"

    auto: Any = AutoModelForCausalLM
    exported = auto.from_pretrained(str(target)).eval()
    tokens = torch.arange(2, 20)[None]
    assert torch.equal(exported(tokens).logits, make_model(kind)(tokens).logits)
    tokenizers: Any = AutoTokenizer
    assert tokenizers.from_pretrained(str(target))("1+1")["input_ids"] == [3, 39, 3]
    assert not (target / "old").exists()
    assert any(target.glob("*.safetensors"))


def test_an_export_may_be_in_another_dtype(ran: Ran) -> None:
    target = ran.folder / "half-export"

    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    auto: Any = AutoModelForCausalLM
    assert auto.from_pretrained(str(target)).dtype == torch.bfloat16


def test_what_chooses_experts_keeps_its_precision_in_an_export(ran: Ran) -> None:
    before, after = (
        choices_of_experts(load_file(ran.folder / name / "model.safetensors"))
        for name in ("routed", "routed-export")
    )

    assert len(before) == len(after) == 2
    for name, bias in before.items():
        assert bias.dtype == after[name].dtype == torch.float32
        assert torch.equal(bias, after[name])


def test_exports_of_adapters_have_the_weights_that_engines_got(ran: Ran, tmp_path: Path) -> None:
    """Adapters are more exact than the weights, and merged as they are."""
    section = ModelSection(path=ran.folder / "qwen3", dtype="bfloat16")

    export_checkpoint(section, ran.folder / "merged" / "step-000001", tmp_path / "again")

    for folder in (ran.folder / "merged" / "export", tmp_path / "again"):
        exported = load_file(folder / "model.safetensors")
        assert len(exported) > 20
        for name, tensor in exported.items():
            assert np.array_equal(tensor.float().numpy(), ran.one["merged"][name]), name
        adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
        assert {matrix.dtype for matrix in adapters.values()} == {torch.bfloat16}


def choices_of_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in tensors.items() if "e_score_correction_bias" in name}


@pytest.fixture
def run_dir(ran: Ran, tmp_path: Path) -> Path:
    """The run directory of what two ranks saved."""
    shutil.copytree(ran.folder / "saved", tmp_path / "run" / "checkpoints")
    model = ModelSection(path=Path("qwen3"), dtype="float32")
    recorded = {"folder": str(ran.folder), "settings": {"model": to_wire(model)}}
    (tmp_path / "run" / "settings.json").write_text(json.dumps(recorded))
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["step-000002", "best"])
def test_an_exported_checkpoint_is_the_trained_model_to_transformers(
    ran: Ran,
    run_dir: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run_dir.parent)
    Path("run/checkpoints/best").symlink_to("step-000002")
    command = ["export", f"run/checkpoints/{name}"]

    assert main(command) == 0
    assert main(command) == 2

    output = capsys.readouterr()
    assert output.out == f"run-{name}\n"
    assert f"run-{name} exists: remove it, or name another directory" in output.err
    expected = load_trained(make_model("qwen3", seed=1), ran.two[0]["save"])
    assert torch.equal(logits(f"run-{name}"), logits_of(expected))
    tokenizers: Any = AutoTokenizer
    assert tokenizers.from_pretrained(f"run-{name}")("1+1")["input_ids"] == [3, 39, 3]


def test_the_moving_average_is_exported_where_the_checkpoint_has_one(
    ran: Ran, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_dir.parent)
    shutil.copytree(ran.folder / "averaged", "run/averaged")

    assert main(["export", "--ema", "run/averaged/step-000002", "average"]) == 0
    assert main(["export", "run/averaged/step-000002", "trained"]) == 0
    assert main(["export", "--ema", "run/checkpoints/step-000002", "none"]) == 2

    expected = load_trained(make_model("qwen3", seed=1), ran.two[0]["average"])
    assert torch.equal(logits("average"), logits_of(expected))
    assert not torch.equal(logits("average"), logits("trained"))
    assert "was saved without train.ema: optimizer.m" in capsys.readouterr().err


def test_an_export_has_the_tokenizers_files_and_weights_in_several_where_one_is_too_large(
    ran: Ran, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(ran.folder / "qwen3", tmp_path / "source"))
    templates = "additional_chat_templates"
    others = {"tiktoken.model", "qwen.tiktoken", "vocab.txt", "preprocessor_config.json", templates}
    for name in (*(others - {templates}), f"{templates}/rag.jinja", "tokenizer_old/notes"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    section = ModelSection(path=source, dtype="bfloat16")
    checkpoint = ran.folder / "saved" / "step-000002"

    export_checkpoint(section, checkpoint, tmp_path / "small", max_shard_nbytes=8000)
    export_checkpoint(section, checkpoint, tmp_path / "large")

    assert others <= {file.name for file in (tmp_path / "small").iterdir()}
    assert (tmp_path / "small" / templates / "rag.jinja").is_file()
    sizes = [file.stat().st_size for file in (tmp_path / "small").glob("model-0*.safetensors")]
    assert len(sizes) > 3
    assert max(sizes) < 10_000
    assert torch.equal(logits(str(tmp_path / "small")), logits(str(tmp_path / "large")))


def test_a_model_that_transformers_converts_is_exported_in_its_stored_form(tmp_path: Path) -> None:
    auto: Any = AutoModelForCausalLM
    start = auto.from_config(Qwen3MoeConfig(**SMALL_EXPERTS)).eval()
    start.save_pretrained(tmp_path / "start")
    save_tokenizer(tmp_path / "start")
    trained = auto.from_config(Qwen3MoeConfig(**SMALL_EXPERTS)).eval()
    save_parameters(trained, tmp_path / "saved")

    export_checkpoint(
        ModelSection(path=tmp_path / "start", dtype="float32"), tmp_path / "saved", tmp_path / "out"
    )

    assert torch.equal(logits(str(tmp_path / "out")), logits_of(trained))
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "start")


def test_only_a_complete_checkpoint_of_the_same_model_is_exported(ran: Ran, tmp_path: Path) -> None:
    checkpoint = ran.folder / "saved" / "step-000002"
    section = ModelSection(path=ran.folder / "llama", dtype="float32")

    with pytest.raises(ConfigError, match=f"of another model than {section.path}: model"):
        export_checkpoint(section, checkpoint, tmp_path / "out")
    assert main(["export", str(ran.folder / "saved"), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (torch.nn.Linear(3, 2), r"model.weight is \[3, 2\] there and \[2, 3\] here"),
        (torch.nn.Linear(2, 3, bias=False), r"model.bias is \[3\] there and missing here"),
        (torch.nn.Bilinear(2, 2, 3), r"model.weight is \[3, 2\] there and \[3, 2, 2\] here"),
    ],
)
def test_a_refused_checkpoint_names_both_models_and_the_first_parameter_that_differs(
    run_dir: Path, other: torch.nn.Module, difference: str
) -> None:
    checkpoint, own = run_dir / "checkpoints/step-000009", run_dir / "other"
    start = json.loads((run_dir / "settings.json").read_text())["folder"] + "/qwen3"
    save_parameters(torch.nn.Linear(2, 3), checkpoint)
    saved = StoredParameters(checkpoint)

    saved.check_fit(dict(torch.nn.Linear(2, 3).named_parameters()), own)
    said = f"checkpoint {checkpoint} is of another model than {own}: {difference}; "
    with pytest.raises(ConfigError, match=f"{said}append model.path={start}, or leave out --mod"):
        saved.check_fit(dict(other.named_parameters()), own)
    with pytest.raises(ConfigError, match=f"than {start}: {difference}; name the model that its"):
        saved.check_fit(dict(other.named_parameters()), Path(start))


def load_trained(model: Any, arrays: dict[str, Any]) -> Any:
    """The model with the saved parameters; the optimizer's arrays are left out."""
    for name, parameter in model.named_parameters():
        parameter.data = torch.tensor(arrays[name])
    return model


def save_parameters(model: Any, folder: Path) -> None:
    """A complete checkpoint."""
    distributed_checkpoint: Any = dcp
    tensors = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    with pytest.warns(UserWarning, match="intent is to save in a single process"):
        distributed_checkpoint.save(tensors, checkpoint_id=str(folder))
    (folder / "trainer.json").write_text('{"step": 1, "version": 1, "world_size": 1, "seed": 0}')
    complete(folder, {})


def stored_names(folder: Path) -> list[str]:
    return sorted(StoredWeights(folder).names)


def logits(folder: str) -> Any:
    auto: Any = AutoModelForCausalLM
    return logits_of(auto.from_pretrained(folder).eval())


def logits_of(model: Any) -> Any:
    return model(torch.arange(2, 20)[None]).logits


def test_what_killed_exports_left_is_no_obstacle_and_goes(ran: Ran) -> None:
    assert ran.one["beside"] == []
    assert (ran.folder / "beside" / "model.safetensors").stat().st_size > 1000


@pytest.mark.parametrize("ways", [[], ["without-exchange"]])
def test_a_kill_at_any_point_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, ways: list[str]
) -> None:
    program = Path(__file__).parent / "killed_replacements.py"
    command = [sys.executable, str(program), str(tmp_path), *ways]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    seen = json.loads(done.stdout)
    at_once, later = zip(*seen, strict=True)
    num_old = later.count("old")
    assert min(num_old, len(later) - num_old) > 5, "it is killed before and after the exchange"
    assert later == ("old",) * num_old + ("new",) * (len(later) - num_old)
    # Only where two names cannot be exchanged is there nothing, between two renames.
    assert at_once.count(None) == len(ways)
    assert [now or "old" for now in at_once] == list(later)
