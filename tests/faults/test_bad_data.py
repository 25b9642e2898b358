"""Data sets and tokenizers that cannot be used. Rank 0 reads them; every rank reports the error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from run_assets import write_rows
from whole_runs import BAD_INPUT_LIMIT_S, start_run

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.patient]

GOOD = '{"prompt": "all 12345=", "answer": "12345"}\n'


@pytest.mark.parametrize(
    ("num_ranks", "text", "words"),
    [
        (2, "", ["data.train: ", "bad.jsonl is empty; it needs at least one prompt"]),
        (2, "\n\n", ["data set bad.jsonl is empty: it has no rows"]),
        (0, '{"question": "2+2?"}\n', ["line 1: no column 'prompt'", "set data.prompt_column"]),
        (0, GOOD + '{"prompt": "all 1', ["bad.jsonl, line 2: not JSON", "one object a line"]),
        (0, GOOD + '{"prompt": "1\\ud800"}', ["bad.jsonl, line 2: column 'prompt' holds a lone"]),
        (
            2,
            GOOD + json.dumps({"prompt": "1" * 30}) + "\n",
            ["line 2: the prompt has 30 tokens", "only 24 fit", "raise pool.max_context_len"],
        ),
    ],
)
def test_bad_data_is_named_with_its_line(
    folder: Path, num_ranks: int, text: str, words: list[str]
) -> None:
    (folder / "bad.jsonl").write_text(text)

    with start_run(folder, "data.train=bad.jsonl", num_ranks=num_ranks) as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("DataError", *words)


def test_more_ranks_than_prompts_is_an_error_of_every_rank(folder: Path) -> None:
    write_rows(folder / "one.jsonl", [{"prompt": "all 1=", "answer": "1"}])

    with start_run(folder, "data.train=one.jsonl") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    ended.check_failed("has 1 prompts for 2 ranks", "use 1 ranks or fewer")


def test_a_tokenizer_that_does_not_fit_the_model_is_an_error_of_every_rank(
    folder: Path, assets: Path
) -> None:
    model_dir = folder / "model"
    shutil.copytree(assets / "model", model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))

    with start_run(folder, f"model.path={model_dir}") as run:
        ended = run.wait(BAD_INPUT_LIMIT_S)

    assert ended.status == 1
    ended.check_failed("has token id 41, but the model has vocab_size 20", "copy the tokenizer")
