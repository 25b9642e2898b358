"""Comparisons of two results: tables of sets, and other prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from umbra.runtime.cli.umbra_command import main
from umbra.runtime.errors import ConfigError
from umbra.runtime.rollout.prompts import write_prompts
from umbra.trainer.data.prompt_preparation import PromptFiles
from umbra.trainer.serving.eval_command import SetResults, comparison, prompt_results


def write_results(
    path: Path, sets: Mapping[str, Sequence[int]], *, num_each: int = 1, **fields: Any
) -> Path:
    prompts = {
        name: {f"{name}/{i}": (f"{name}{i}", k) for i, k in enumerate(right)}
        for name, right in sets.items()
    }
    path.write_text(json.dumps({"samples_per_prompt": num_each, "prompts": prompts} | fields))
    return path


def test_sets_are_compared_each_and_together_whatever_their_order(tmp_path: Path) -> None:
    a = write_results(tmp_path / "a", {"easy": [1, 1, 0], "hard": [0, 0]}, model="ignored")
    b = write_results(tmp_path / "b", {"hard": [1, 0], "easy": [1, 0, 1]})

    cells = [dict(zip(comparison(a, b)[0], row, strict=True)) for row in comparison(a, b)[1:]]

    assert [cell["set"] for cell in cells] == ["easy", "hard", "all"]
    assert [cell["B - A"] for cell in cells] == ["+0.0000", "+0.5000", "+0.2000"]
    assert [(cell["A better"], cell["B better"]) for cell in cells] == [
        ("1", "1"),
        ("0", "1"),
        ("1", "2"),
    ]
    assert (cells[2]["prompts"], cells[2]["A"], cells[2]["B"]) == ("5", "0.4000", "0.6000")
    assert [cell["p"] for cell in cells] == ["1", "1", "1"]


def test_the_command_compares_and_needs_no_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(write_results(tmp_path / "a", {"eval": [0] * 10}))
    b = str(write_results(tmp_path / "b", {"eval": [1] * 8 + [0] * 2}))

    statuses = [
        main(["eval", *arguments])
        for arguments in (["--compare", a, b], ["x", "--compare", a, b], [])
    ]

    shown = capsys.readouterr()
    assert statuses == [0, 2, 2]
    assert shown.out.splitlines() == [
        "set   prompts       A       B    B - A       95 % interval  A better  B better       p",
        "eval       10  0.0000  0.8000  +0.8000  [+0.2034, +0.9433]         0         8  0.0078",
    ]
    assert shown.err.splitlines() == [
        "umbra: --compare evaluates nothing: leave CONFIG and --checkpoint out",
        "umbra: name the CONFIG to evaluate, or two results to --compare",
    ]


def test_results_of_other_prompts_are_refused_by_name(tmp_path: Path) -> None:
    a = write_results(tmp_path / "a", {"eval": [1, 0]})
    more = write_results(tmp_path / "more", {"eval": [1, 0, 1, 1]})
    changed = {"eval": {f"eval/{i}": (f"eval{2 * i}", 1) for i in range(2)}}
    other = write_results(tmp_path / "other", {}, prompts=changed)
    renamed = write_results(tmp_path / "renamed", {"math": [1, 0]})

    for first, second in ((a, more), (more, a)):
        with pytest.raises(
            ConfigError, match=r"have different prompts, 2 in all: 'eval/2' is only in .*more; "
        ):
            comparison(first, second)
    with pytest.raises(
        ConfigError, match=r"have different prompts, 1 in all: 'eval/1' has other columns; "
    ):
        comparison(a, other)
    with pytest.raises(
        ConfigError, match=r"have different prompts, 4 in all: 'eval/0' is only in .*/a; "
    ):
        comparison(a, renamed)


def test_results_are_found_in_run_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "eval").mkdir(parents=True)
        write_results(tmp_path / name / "eval" / "results.json", {"eval": [1, 0]})

    assert comparison(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"/eval/results\.json cannot be read: .*: give the r"):
        comparison(tmp_path / "a", tmp_path)


def test_results_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    a = write_results(tmp_path / "a", {"eval": [1, 0]})
    sampled = write_results(tmp_path / "sampled", {"eval": [1, 0]}, num_each=4)
    old = tmp_path / "old"
    old.write_text('{"samples_per_prompt": 1}')

    with pytest.raises(ConfigError, match=r"has 1 completions .* has 4: .* same eval\.samples"):
        comparison(a, sampled)
    with pytest.raises(ConfigError, match=r"old is not a results.json .prompts: Field required"):
        comparison(a, old)
    with pytest.raises(ConfigError, match="absent cannot be read: No such file"):
        comparison(tmp_path / "absent", a)


def test_prompts_are_recognized_by_the_data_and_not_by_the_template(tmp_path: Path) -> None:
    def stored(template: str, answer: int) -> SetResults:
        records = [
            {
                "id": f"{name}/0",
                "prompt": template + name,
                "tokens": np.arange(3, dtype="<i4").tobytes(),
                "row": {"question": name, "answer": answer},
            }
            for name in ("easy", "hard")
        ]
        path = tmp_path / "prompts"
        num = write_prompts(path, records)
        sizes = {"easy": 1, "hard": 1}
        files = PromptFiles(
            train_path=path, num_train=0, eval_path=path, num_eval=num, eval_sets=sizes
        )
        return prompt_results(files, [2, 1])

    first = stored("", 1)

    assert first["hard"]["hard/0"].num_right == 1
    assert first == stored("Q: ", 1)
    assert first["easy"]["easy/0"].data != stored("", 2)["easy"]["easy/0"].data
