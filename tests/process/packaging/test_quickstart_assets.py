"""The quickstart's files: an honest task, a model that starts low, and no work done twice."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from umbra.trainer.quickstart.quickstart_command import MARKER, NUM_EVAL, NUM_TRAIN, ensure_assets
from umbra.trainer.quickstart.quickstart_task import MAX_DIGITS, draw_tasks, reward, solve


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "assets"
    assert ensure_assets(folder, seed=5)
    return folder


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy_answers(model_dir: Path, prompts: list[str]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto_model: Any = AutoModelForCausalLM
    auto_tokenizer: Any = AutoTokenizer
    tokenizer = auto_tokenizer.from_pretrained(str(model_dir), padding_side="left")
    model = auto_model.from_pretrained(str(model_dir))
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    tokens = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=MAX_DIGITS + 1,  # and the end-of-text token
        do_sample=False,
    )
    width = inputs["input_ids"].shape[1]
    return list(tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True))


def test_solutions_are_the_digits_asked_for_in_order() -> None:
    assert solve("even", "73914826") == "2468"
    assert solve("odd", "73914826") == "1379"
    assert solve("low", "50917") == "01"
    assert solve("high", "50917") == "579"
    assert solve("all", "50917") == "01579"


def test_tasks_are_a_function_of_the_seed_and_never_repeat() -> None:
    tasks = draw_tasks(random.Random(3), 500)

    assert tasks == draw_tasks(random.Random(3), 500)
    assert len({task.prompt for task in tasks}) == 500
    assert all(task.answer for task in tasks)


def test_only_exactly_the_right_answer_is_rewarded() -> None:
    completions = ["2468", "246", "24688", "?", ""]

    rewards = reward(["even 73914826="] * 5, completions, answer=["2468"] * 5, kind=["even"] * 5)

    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_held_out_prompts_are_not_trained_on(assets: Path) -> None:
    training, held_out = read_rows(assets / "train.jsonl"), read_rows(assets / "eval.jsonl")

    assert (len(training), len(held_out)) == (NUM_TRAIN, NUM_EVAL)
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}


@pytest.mark.slow
def test_the_starting_model_is_right_sometimes(assets: Path) -> None:
    rows = read_rows(assets / "eval.jsonl")

    answers = greedy_answers(assets / "model", [row["prompt"] for row in rows])

    right = sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True))
    assert 0.1 <= right / len(rows) <= 0.4


@pytest.mark.slow
def test_files_are_made_once_for_a_seed(assets: Path) -> None:
    before = (assets / "train.jsonl").stat().st_mtime_ns

    assert not ensure_assets(assets, seed=5)
    assert (assets / "train.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.process
def test_files_are_made_although_nobody_reads_about_it(assets: Path) -> None:
    """`make quickstart | head` goes on to the training."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "umbra.trainer.quickstart", str(assets), "--seed", "5"]

    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)

    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_files_without_their_marker_are_made_again(assets: Path) -> None:
    (assets / MARKER).unlink()
    (assets / "train.jsonl").write_text("half a file")

    assert ensure_assets(assets, seed=5)
    assert len(read_rows(assets / "train.jsonl")) == NUM_TRAIN
    assert [entry.name for entry in assets.parent.iterdir()] == [assets.name]
