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


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_names_a_reward_that_is_there(path: Path) -> None:
    reward = load_config(path).reward
    assert reward.function is not None
    module, _, function = reward.function.partition(":")
    (folder,) = reward.python_path

    shown = runpy.run_path(str(RECIPES.parents[1] / folder / f"{module}.py"))

    assert callable(shown[function])
