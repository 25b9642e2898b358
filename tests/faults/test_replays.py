"""`umbra replay`: steps of a run, trained again from its ledger, bit for bit or differently."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from whole_runs import END_LIMIT_S, HERE, START_LIMIT_S, start_run, write_config

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.dash.sample_texts import open_ledger
from umbra.runtime.rollout.ledger.ledger_history import Position
from umbra.trainer.checkpoint.trainer_state import checkpoint_step, complete_checkpoints
from umbra.trainer.reporting.metrics_loggers import merge_steps, read_metrics
from umbra.trainer.reporting.metrics_plot import panels

pytestmark = [pytest.mark.process, pytest.mark.slow]

SETTINGS = (
    *("pool.engine=embedded", "pool.engine_args={}", "train.device=cpu", "model.dtype=float32"),
    *("train.checkpoint_every=2", "train.keep_checkpoints=99", "train.log_entropy=true"),
    *("train.loss=decoupled", "train.mini_batches=2", "train.kl_coef=0.1"),
)


@pytest.fixture(scope="module")
def resumed(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The directory of a run on two ranks that was killed and resumed, and the step before the
    resume; four more followed it."""
    folder = tmp_path_factory.mktemp("resumed")
    write_config(folder, assets)
    settings = (*SETTINGS, "reward.function=plain_rewards:distinct_after_a_while")
    settings += ("train.advantage=gae", "critic.learning_rate=1e-3", "critic.lam=0.95")
    with start_run(folder, *settings, "train.steps=100000") as run:
        run.wait_for_step(5)
        run.kill_all(random.Random(0))
    newest = checkpoint_step(complete_checkpoints(folder / "run/checkpoints")[-1])
    assert newest >= 4
    with start_run(folder, *settings, f"train.steps={newest + 4}", "run.resume=auto") as run:
        ended = run.wait()
    assert ended.status == 0, ended.output
    return folder / "run", newest


def replayed(run_dir: Path, out: Path, steps: str, *settings: str) -> str:
    """The output of the command, which has to succeed."""
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "umbra.runtime.cli.umbra_command"]
    command += ["replay", str(run_dir), "--steps", steps, "-o", str(out), *settings]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_LIMIT_S + END_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """What training measured, by step."""
    return {
        int(row["step"]): {
            name: value for name, value in row.items() if name.startswith(("train/", "critic/"))
        }
        for row in merge_steps(read_metrics(folder / "metrics.jsonl"))
        if "train/loss" in row
    }


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Parameters and the optimizer's state. Random numbers are not drawn in training."""
    reader = FileSystemReader(checkpoint)
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in saved.items()
        if not name.startswith("random.")
    }
    library: Any = dcp
    with warnings.catch_warnings():  # torch warns that it loads without a process group
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        library.load(tensors, storage_reader=reader)
    return tensors


def check_equal(checkpoint: Path, other: Path) -> None:
    tensors, others = tensors_of(checkpoint), tensors_of(other)
    assert tensors.keys() == others.keys()
    assert any(name.startswith("optimizer.") for name in tensors)
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []


def contents_of(folder: Path) -> Mapping[str, str]:
    """A digest of each file."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_replay_over_a_resume_is_the_run_bit_for_bit_and_leaves_it_as_it_is(
    resumed: tuple[Path, int], tmp_path: Path
) -> None:
    run_dir, newest = resumed
    before, last = contents_of(run_dir), newest + 4

    output = replayed(run_dir, tmp_path / "again", f"{newest - 1}:{last}")

    of_run = {step: row for step, row in metrics_of(run_dir).items() if step >= newest - 1}
    assert list(of_run) == [*range(newest - 1, last + 1)]
    assert metrics_of(tmp_path / "again") == of_run
    name = f"checkpoints/step-{last:06d}"
    check_equal(run_dir / name, tmp_path / "again" / name)
    assert "all metrics of 6 steps are the run's, bit for bit" in output
    assert contents_of(run_dir) == before


def test_another_loss_gives_other_curves_beside_those_of_the_run(
    resumed: tuple[Path, int], tmp_path: Path
) -> None:
    run_dir, newest = resumed
    out, steps = tmp_path / "other", range(newest + 1, newest + 5)
    different = ("train.loss=cispo", "train.learning_rate=0.01", "train.mini_batches=1")
    different += ("train.advantage=dr_grpo",)  # without the run's critic

    output = replayed(run_dir, out, f"{steps[0]}:{steps[-1]}", *different)

    rows = read_metrics(out / "metrics.jsonl")
    of_run = metrics_of(run_dir)
    assert [row["step"] for row in rows] == [*steps]
    assert [row["run/train/loss"] for row in rows] == [of_run[step]["train/loss"] for step in steps]
    assert all(row["train/loss"] != row["run/train/loss"] for row in rows)
    found = {panel.title: panel.series for panel in panels(rows)}
    for title in ("Loss", "Gradient norm", "Behaviour KL", "Entropy"):
        own, of_run_ = found[title]
        assert of_run_.label == "in the run"
        assert list(own.steps) == list(of_run_.steps) == [*steps]
        assert own.values != of_run_.values
    assert "bit for bit" not in output
    assert (out / "metrics.png").stat().st_size > 0
    assert "run/train/loss" in (out / "report.html").read_text()


def test_one_rank_replays_several_rewards_from_the_starting_model(
    assets: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, assets)
    settings = [*SETTINGS, "train.steps=3", "train.advantage=gdpo", "train.advantage_norm=batch"]
    settings += ["reward.function=", "reward.functions.distinct=plain_rewards:distinct"]
    settings += ["reward.overlong_buffer=4", "rollout.top_p=0.8", "train.mask_truncated=true"]
    with start_run(tmp_path, *settings, num_ranks=0) as run:
        assert run.wait().status == 0

    replayed(tmp_path / "run", tmp_path / "again", "1:3")

    assert metrics_of(tmp_path / "again") == metrics_of(tmp_path / "run")
    assert len(metrics_of(tmp_path / "run")) == 3
    last = "checkpoints/step-000003"
    check_equal(tmp_path / "run" / last, tmp_path / "again" / last)


def test_a_replay_on_other_ranks_is_refused_with_the_command_that_has_as_many(
    resumed: tuple[Path, int], tmp_path: Path
) -> None:
    run_dir, newest = resumed
    done = subprocess.run(
        [sys.executable, "-m", "umbra.trainer.replay", str(run_dir), "--steps", f"{newest + 1}"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "the run had 2 ranks on these steps, and this replay has 1" in done.stderr
    command = f"torchrun --nproc-per-node 2 -m umbra.trainer.replay {run_dir} --steps {newest + 1}:"
    assert command in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("steps", "setting", "message"),
    [
        (
            "2:3",
            "train.loss=cispo",
            "needs the checkpoint after step 1, and the run has those after",
        ),
        ("2:3", "train.loss=cispo", ": replay --steps 1:"),
        ("1:999", "", "--steps 1:999: the run has trained steps 1 to "),
        ("3:4", "rollout.group_size=4", "(command line): it changes the rollouts"),
        ("3:4", "reward.function=a:b", "(command line): it changes the rollouts"),
        ("3:4", "model.path=other", "(command line): it changes the rollouts"),
        ("3:4", "pools.judge.count=2", "(command line): it changes the rollouts"),
        ("3:4", "eval.samples=2", "(command line): a replay evaluates nothing"),
        ("3:4", "train.eval_every=2", "(command line): a replay evaluates nothing"),
        ("3:4", "train.export=false", "(command line): it has no effect on a replay"),
        ("3:4", "train.optimizer=muon", "leave it out, or replay from step 1"),
        ("3:4", "train.ema=0.9", "leave it out, or replay from step 1"),
        ("3:4", "critic.path=other", "leave it out, or replay from step 1"),
        ("3:4", "train.mini_batches=3", "use a divisor of rollout.groups_per_step"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_starts(
    resumed: tuple[Path, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    steps: str,
    setting: str,
    message: str,
) -> None:
    out, settings = tmp_path / "none", filter(None, [setting])

    status = main(["replay", str(resumed[0]), "--steps", steps, "-o", str(out), *settings])

    assert status == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_torchrun_that_cannot_be_started_is_no_fault_of_the_output_folder(
    resumed: tuple[Path, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    status = main(["replay", str(resumed[0]), "--steps", "1:2", "-o", str(tmp_path / "none")])

    assert status == 2
    message = f"umbra: cannot start {tmp_path / 'python'}: No such file or directory\n"
    assert capsys.readouterr().err == message


def test_a_checkpoint_of_a_discarded_history_begins_no_replay(
    resumed: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, step = tmp_path / "run", resumed[1] + 2
    shutil.copytree(resumed[0], copy)
    # The first life would have trained this step on its version of that number.
    state = copy / f"checkpoints/step-{step:06d}/trainer.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"version": step}))

    status = main(["replay", str(copy), "--steps", f"{step + 1}", "-o", str(tmp_path / "none")])

    assert status == 2
    has = ", ".join(map(str, [*range(2, step, 2), step + 2]))
    assert (
        f"after step {step}, and the run has those after steps {has}: " in capsys.readouterr().err
    )


def test_samples_that_the_ledger_no_longer_has_are_refused(
    resumed: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(resumed[0], copy)
    ledger = open_ledger(copy)
    ledger.remove_oldest(0.0, Position.parse(ledger.end))

    status = main(["replay", str(copy), "--steps", "1:2", "-o", str(tmp_path / "none")])

    assert status == 2
    message = "because rollout.ledger_gb = 8 keeps the newest: replay later steps"
    assert message in capsys.readouterr().err
