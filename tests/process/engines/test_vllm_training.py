"""A training run of the quickstart's size with vLLM, checked with the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_runs import Collector, collect, run_async, running, wire_request
from vllm_runs import needs_vllm

from umbra.engines.embedded.embedded_engine import EmbeddedEngine
from umbra.runtime.text.model_tokenizer import ModelTokenizer

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.process]

CONFIG = Path(__file__).parents[3] / "launch/configs/quickstart.toml"
LIMIT_S = 300.0


def run_python(*arguments: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def embedded_accuracy(model: Path, rows: list[dict[str, str]]) -> float:
    """The share of prompts that the embedded engine answers rightly, greedily."""
    tokenizer = ModelTokenizer.open(model)
    collector = Collector()

    async def body() -> None:
        engine = EmbeddedEngine(
            model_path=str(model), max_context_len=32, tick_ms=2.0, load_weights=True
        )
        async with running(engine):
            await engine.submit(
                [
                    wire_request(
                        i,
                        tokenizer.encode_prompt(row["prompt"]),
                        max_new_tokens=10,
                        temperature=0.0,
                        stop_token_ids=tokenizer.end_token_ids,
                    )
                    for i, row in enumerate(rows)
                ]
            )
            await collect(engine, collector, len(rows))

    run_async(body)
    answers = [tokenizer.decode(collector[i].tokens) for i in range(len(rows))]
    return sum(a == row["answer"] for a, row in zip(answers, rows, strict=True)) / len(rows)


def test_a_run_with_vllm_learns_and_its_model_answers_the_same_elsewhere(tmp_path: Path) -> None:
    run_python("umbra.trainer.quickstart", "runs/quickstart-assets", folder=tmp_path)
    settings = ("pool.engine=vllm", "pool.count=1", "train.steps=4", "train.eval_every=0")

    run_python("umbra.trainer", str(CONFIG), *settings, folder=tmp_path)

    run = tmp_path / "runs/quickstart"
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    lines = (tmp_path / "runs/quickstart-assets/eval.jsonl").read_text().splitlines()
    assert summary["engine_restarts"] == 0
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    expected = embedded_accuracy(run / "export", [json.loads(line) for line in lines])
    assert summary["accuracy_after"] == pytest.approx(expected, abs=0.004)  # one near-tie
