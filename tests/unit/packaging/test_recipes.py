"""The rewards of launch/recipes, as far as they can be tested without models and data."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from umbra.trainer.config.config_file import load_config

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 72 altogether.\n#### 72"


@pytest.mark.parametrize(
    ("completion", "solution", "reward"),
    [
        ("48 + 24 = 72. She sold 72 clips.", SOLUTION, 1.0),
        (r"The answer is \boxed{72.00}.", SOLUTION, 1.0),
        ("72 is 48 more than 24", SOLUTION, 0.0),
        ("I do not know.", SOLUTION, 0.0),
        ("It costs $1,450.", "so 1450\n#### 1,450", 1.0),
        ("The change is -3.", "#### 3", 0.0),
    ],
)
def test_the_last_number_has_to_be_the_answer(
    completion: str, solution: str, reward: float
) -> None:
    exact: Any = runpy.run_path(str(RECIPES / "gsm8k" / "gsm8k_reward.py"))["exact"]

    assert exact(["?"], [completion], answer=[solution], question=["?"]) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("15 - 43 - 75 = -28 - 75 = -103.", "-103", 1.0),
        ("The answer is 1,450", "1450", 1.0),
        ("12 + 7 is 19, not 20", "19", 0.0),
        ("I do not know.", "19", 0.0),
    ],
)
def test_the_last_number_of_a_sum_has_to_be_its_value(
    completion: str, answer: str, reward: float
) -> None:
    exact: Any = runpy.run_path(str(RECIPES / "arithmetic" / "arithmetic_reward.py"))["exact"]

    assert exact(["?"], [completion], answer=[answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"12 - 40 = \boxed{-28}.", 1.0),
        (r"\boxed{5} or rather \boxed{-28}", 1.0),
        (r"\boxed{-28} or rather \boxed{5}", 0.0),
        ("12 - 40 = -28", 0.0),
        (r"\boxed{}", 0.0),
    ],
)
def test_only_a_right_answer_in_its_form_is_rewarded(completion: str, reward: float) -> None:
    module = runpy.run_path(str(RECIPES / "arithmetic" / "arithmetic_reward.py"))
    boxed: Any = module["boxed"]

    assert boxed(["?"], [completion], answer=["-28"]) == [reward]


@pytest.mark.parametrize(
    ("question", "work"),
    [
        ("84 - 12 =", "84 - 12 = 84 - 10 - 2 = 74 - 2 = 72"),
        ("6 + 9 =", "6 + 9 = 6 + 0 + 9 = 6 + 9 = 15"),
        ("3 - 38 =", "3 - 38 = 3 - 30 - 8 = -27 - 8 = -35"),
    ],
)
def test_worked_answers_end_with_the_answer(question: str, work: str) -> None:
    with_work: Any = runpy.run_path(str(RECIPES / "arithmetic" / "arithmetic_assets.py"))[
        "with_work"
    ]
    row = {"messages": [{"role": "user", "content": question}], "answer": work.split()[-1]}

    assert with_work(row)[-1] == {"role": "assistant", "content": work}


@pytest.mark.parametrize(
    "path",
    sorted(path for path in RECIPES.rglob("*.toml") if "[sft]" not in path.read_text()),
    ids=lambda path: path.stem,
)
def test_a_recipe_names_a_reward_that_is_there(path: Path) -> None:
    reward = load_config(path).reward
    assert reward.function is not None
    module, _, function = reward.function.partition(":")
    (folder,) = reward.python_path

    shown = runpy.run_path(str(RECIPES.parents[1] / folder / f"{module}.py"))

    assert callable(shown[function])
