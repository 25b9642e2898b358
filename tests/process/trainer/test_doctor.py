"""`umbra doctor` finds what would end a run, and says how to fix it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from huggingface_hub import constants
from preloaded_python import PreloadedProcess

from umbra.runtime.cli.umbra_command import main
from umbra.trainer.doctor.doctor import (
    _each_cause_once,  # pyright: ignore[reportPrivateUsage]
)
from umbra.trainer.doctor.node_checks import Verdict, listen

pytestmark = [pytest.mark.process, pytest.mark.slow]

_REWARDS: Final = """
import os, signal, time

def score(prompts, completions, answer):
    return [len(completion) for completion in completions]

def raises(prompts, completions, **columns):
    return [1 / 0]

def exits(prompts, completions, **columns):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(completions, **columns):
    time.sleep(1000)

async def blocks(completions, **columns):
    time.sleep(1000)
"""
_HANGS: Final = "reward.function=rewards:hangs reward.timeout_s=2"
_BLOCKS: Final = "reward.function=rewards:blocks reward.timeout_s=8"


@pytest.fixture
def config(tmp_path: Path, umbra_tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
    )
    Path("rewards.py").write_text(_REWARDS)
    Path("other.jsonl").write_text('{"prompt": "1+1=", "solution": "2"}\n' * 2)
    Path("cut.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+')
    Path("checkpoints/step-7").mkdir(parents=True)
    Path("checkpoints/step-7/COMPLETE").touch()  # of an earlier version
    path = Path("config.toml")
    path.write_text(
        f"""
        [model]
        path = "{umbra_tiny_model_dir}"
        [data]
        train = "train.jsonl"
        [reward]
        function = "rewards:score"
        [rollout]
        max_new_tokens = 16
        groups_per_step = 2
        [pool]
        engine = "echo"
        engine_args = {{vocab_size = 42}}
        [train]
        steps = 1
        device = "cpu"
        """
    )
    return path


def verdicts(output: str) -> Mapping[str, str]:
    """The verdict and the text by check."""
    rows = [line for line in output.splitlines() if line.startswith(("ok ", "FAILED ", "- "))]
    return {row[8:22].strip(): f"{row[:7].strip()}: {row[23:]}" for row in rows}


@pytest.fixture
def sft_config(config: Path, umbra_tiny_model_dir: Path) -> Path:
    path = Path("sft.toml")
    path.write_text(
        f"""
        [model]
        path = "{umbra_tiny_model_dir}"
        [data]
        train = "train.jsonl"
        [sft]
        completion_column = "answer"
        batch_size = 2
        [train]
        steps = 1
        device = "cpu"
        """
    )
    return path


def test_a_config_of_fine_tuning_is_checked_to_its_last_row(
    sft_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(sft_config)]) == 0
    assert verdicts(capsys.readouterr().out)["rows"].startswith("ok: 2 rows with ")

    with Path("train.jsonl").open("a") as file:
        file.write('{"prompt": "1+3="}\n')
    assert main(["doctor", str(sft_config)]) == 1
    found = verdicts(capsys.readouterr().out)["rows"]
    assert found.startswith("FAILED: train.jsonl, line 3: no column 'answer'")

    assert main(["doctor", str(sft_config), "sft.max_len=9999"]) == 1
    found = verdicts(capsys.readouterr().out)
    assert found["setup"].startswith("FAILED: sft.max_len = 9999 exceeds the model's")
    assert found["rows"] == "-: not checked: see setup"


def test_ranks_check_a_config_of_fine_tuning_together(sft_config: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--standalone", "-m", "umbra.trainer.doctor", str(sft_config)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = verdicts(done.stdout)
    assert found["setup"].endswith(", 2 rows a step for 2 ranks")
    assert {"rows", "clocks", "NCCL"} <= found.keys()


def test_verdicts_are_shown_while_the_next_check_takes_its_time(config: Path) -> None:
    os.mkfifo("gate")
    Path("rewards.py").write_text(f"open('gate', 'rb', 0).read(1)\n{_REWARDS}")
    gate = os.open("gate", os.O_RDWR)  # each import of the reward's module takes a byte of it
    command = [sys.executable, "-m", "umbra.runtime.cli.umbra_command", "doctor", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as doctor:
        assert doctor.stdout is not None
        try:
            shown, _, _ = select.select([doctor.stdout], [], [], 60.0)
            first = doctor.stdout.readline() if shown else ""
        finally:
            os.write(gate, bytes(99))
        rest = doctor.stdout.read()
    os.close(gate)

    assert first.startswith("ok ")
    assert rest.endswith("all is well\n")


def test_all_is_well(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", str(config)])

    output = capsys.readouterr().out
    found = verdicts(output)
    assert status == 0, output
    assert output.rstrip().endswith("all is well")
    assert "This node alone was checked" in output
    assert found["prompts"] == "ok: 2 to train on, 0 held out"
    assert found["reward, agent"] == "ok: rewards:score"
    assert found["first reward"] == "ok: 4 for 8 completions that repeat the first prompt"
    assert found["engine policy"] == "ok: echo"
    assert found["placement"] == "ok: 2 ranks on cpu, engines: 1 of policy"
    assert found["CUDA IPC"].startswith("-: ")
    assert not list(Path().glob("runs/*/metrics.jsonl"))


@pytest.mark.parametrize(
    ("check", "setting", "text"),
    [
        ("model", "model.path=none", "model.path: no directory"),
        ("data", "data.train=none.jsonl", "data.train: no file"),
        ("loss", "train.loss=rewards:loss", "has no function 'loss'"),
        ("reward, agent", "reward.function=rewards:scor", "did you mean 'score'?"),
        ("prompts", "data.train=cut.jsonl", "cut.jsonl, line 2: not JSON"),
        ("first reward", "data.train=other.jsonl", "takes ['answer'], which the data set lacks"),
        ("first reward", "reward.function=rewards:raises", "raised ZeroDivisionError"),
        ("first reward", "reward.function=rewards:exits", "killed by SIGKILL"),
        ("first reward", _HANGS, "rewards.py:14 in hangs: time.sleep(1000)"),
        ("first reward", _BLOCKS, "rewards.py:17 in blocks: time.sleep(1000)"),
        ("run directory", "run.dir=train.jsonl/run", "is a file, not a folder"),
        ("run directory", "run.resume=none", "checkpoint none does not exist"),
        ("run directory", "run.resume=checkpoints/step-7", "step-7 has format 0, and this version"),
        ("engine policy", "pool.engine_args={vocab=42}", "pool.engine_args.vocab: "),
        ("context", "rollout.max_new_tokens=9999", "leaves no room for a prompt"),
        ("GPUs", "train.device=cuda", "this node shows no GPU"),
    ],
)
def test_what_would_end_a_run_fails_its_check_alone(
    check: str, setting: str, text: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if check == "GPUs" and _has_gpu():
        pytest.skip("there is a GPU")

    status = main(["doctor", str(config), *setting.split()])

    output = capsys.readouterr().out
    found = verdicts(output)
    assert status == 1
    assert found[check].startswith("FAILED: ")
    assert text in found[check]
    assert "versions" in found
    assert output.endswith("\n1 check failed\n")


def test_a_teacher_that_could_not_score_all_completions_fails_its_check_alone(
    config: Path, umbra_tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = {"model_path": umbra_tiny_model_dir, "engine": "echo", "max_context_len": 20}
    settings = [f"pools.teacher.{name}={value}" for name, value in teacher.items()]
    settings += ["pools.teacher.engine_args={vocab_size=42}", "train.teacher_kl_coef=1"]

    status = main(["doctor", str(config), *settings])

    output = capsys.readouterr().out
    assert status == 1, output
    assert "FAILED: pools.teacher.max_context_len is 20, and" in verdicts(output)["teacher"]
    assert output.endswith("\n1 check failed\n")


def test_a_mistyped_path_that_could_be_a_name_on_the_hub_fails_one_check_and_the_others_go_on(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    Path("models/qwen").mkdir(parents=True)

    status = main(["doctor", str(config), "model.path=models/qwne"])

    output = capsys.readouterr().out
    found = verdicts(output)
    here = Path("models").absolute()
    assert status == 1
    assert found["hub"].startswith(
        f"FAILED: model.path: no directory {here}/qwne (there is {here}, did you mean "
        "models/qwen?), and the model 'models/qwne' is not in the cache"
    )
    assert found["model"] == "-: not checked: see hub"
    assert found["data"] == "ok: train.jsonl"
    assert output.endswith("\n1 check failed\n")


def test_a_cause_is_shown_once_and_what_is_well_each_time() -> None:
    found = [
        Verdict("one", "ok", "a text"),
        Verdict("two", "ok", "a text"),
        Verdict("three", "FAILED", "a text"),
        Verdict("four", "FAILED", "a text"),
        Verdict("five", "FAILED", "another"),
    ]

    shown = [verdict.state for verdict in _each_cause_once(found)]

    assert shown == ["ok", "ok", "FAILED", "-", "FAILED"]


def test_settings_that_work_but_are_probably_not_meant_are_warned_of(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["rollout.max_staleness=1", "data.eval=train.jsonl"]
    assert main(["doctor", str(config), *settings]) == 0

    output = capsys.readouterr().out
    for name in ("pool.mode = 'hybrid'", "train.loss = 'clipped'"):
        assert f"warning settings       rollout.max_staleness = 1 and {name}: " in output
    assert "warning prompts        data.eval: 2 of 2 prompts are in data.train, too" in output
    assert output.endswith("\nno check failed; see the warnings\n")


def test_a_wrong_setting_ends_it_before_any_check(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(config), "train.steps=many"]) == 2

    assert "train.steps" in capsys.readouterr().err


def test_a_run_directory_in_use_is_reported(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "from pathlib import Path; from umbra.trainer.checkpoint.run_dir import RunLock\n"
        "with RunLock(Path('.')): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        status = main(["doctor", str(config), "run.dir=."])

    assert status == 1
    assert "is in use by process" in verdicts(capsys.readouterr().out)["run lock"]


def test_the_newest_checkpoint_of_a_run_to_resume_is_looked_at(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["doctor", str(config), "run.dir=.", "run.resume=auto"])

    assert status == 1
    assert "step-7 has format 0" in verdicts(capsys.readouterr().out)["run directory"]


@pytest.mark.parametrize("setting", ["", "data.train=none.jsonl"])
def test_the_ranks_of_two_nodes_report_together(
    config: Path, setting: str, tmp_path: Path, fork_server: None
) -> None:
    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    torchrun += ["--rdzv-id", f"doctor-{port}", "--local-addr", "127.0.0.1"]
    program = ["--nproc-per-node", "1", "-m", "umbra.trainer.doctor", str(config)]
    command = [*torchrun, *program, *filter(None, [setting])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    files = [tmp_path / f"node-{idx}.txt" for idx in range(2)]
    nodes = [PreloadedProcess(command, tmp_path, environment, file) for file in files]
    statuses = [node.wait(120.0) for node in nodes]
    outputs = [file.read_text() for file in files]

    (output,) = [text for text in outputs if "clocks" in text]
    found = verdicts(output)
    assert found["nodes"] == "ok: reaches all 2 nodes"
    assert found["clocks"].startswith("ok: within ")
    assert found["NCCL"].startswith("-: ")
    if setting:
        assert found["data"].startswith("FAILED: data.train: no file")
        assert statuses == [1, 1], outputs
    else:
        assert "all is well" in output
        assert statuses == [0, 0], outputs


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
