"""Mutants fit the files that they change, and one that nobody notices is reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mutant import Mutant, run_command
from mutants import MUTANTS, main, try_all

ROOT = Path(__file__).parents[3]
ADDING = "def add(a: int, b: int) -> int:\n    return a + b\n"
CHECK = """
import sys, adding
print("checking")
sys.exit(0 if adding.add(2, 3) == 5 else f"2 + 3 is {adding.add(2, 3)}")
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_file_that_it_changes(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.path
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.path, copy)

    mutant.apply(tmp_path)

    text = copy.read_text()
    assert text != (ROOT / mutant.path).read_text()
    compile(text, mutant.path, "exec")


def test_the_tests_that_mutants_name_exist() -> None:
    named = {argument for mutant in MUTANTS for argument in mutant.command if "::" in argument}

    assert named
    for path, test in (name.split("::") for name in named):
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), f"{path}::{test}"


def test_names_of_mutants_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]

    assert len(set(names)) == len(names)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A program that adds, and a command that checks it."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "adding.py").write_text(ADDING)
    (root / "check.py").write_text(CHECK)
    return root


def wrong_sum(new: str, says: str = "2 [+] 3 is", old: str = "a + b") -> Mutant:
    return Mutant(
        name="wrong sum", path="adding.py", old=old, new=new, command=("check.py",), says=says
    )


@pytest.mark.process
def test_a_mutant_is_caught_by_what_its_command_says(repository: Path) -> None:
    without, caught = try_all([wrong_sum("a - b")], repository)

    assert (without.name, without.said, without.problem) == ("(none)", "passed", "")
    assert (caught.name, caught.said, caught.problem) == ("wrong sum", "2 + 3 is -1", "")
    assert caught.row().startswith("| wrong sum | check.py | 2 + 3 is -1 | ")
    assert (repository / "adding.py").read_text() == ADDING, "only a copy was changed"


@pytest.mark.process
@pytest.mark.parametrize(
    ("mutant", "problem"),
    [
        (wrong_sum("b + a"), "'wrong sum' was not caught: check.py passed and did not say"),
        (wrong_sum("a - b", says="lost"), "failed with status 1 and did not say 'lost'"),
        (wrong_sum("b + a", says="checking"), "check.py passed and said 'checking'"),
        (wrong_sum("a", old="a + c"), "its old text stands 0 times in adding.py, not once"),
        (wrong_sum("a", old="int"), "its old text stands 3 times in adding.py, not once"),
    ],
    ids=["survives", "another reason", "survives and says it", "does not fit", "fits thrice"],
)
def test_a_mutant_that_is_not_caught_is_a_problem(
    repository: Path, mutant: Mutant, problem: str
) -> None:
    without, survivor = try_all([mutant], repository)

    assert without.problem == ""
    assert problem in survivor.problem


@pytest.mark.process
def test_a_command_that_fails_without_the_mutant_is_a_problem(repository: Path) -> None:
    (repository / "adding.py").write_text(ADDING.replace("a + b", "a + b + 1"))

    without, _ = try_all([wrong_sum("a")], repository)

    assert "without a mutant, check.py failed with status 1:" in without.problem
    assert "2 + 3 is 6" in without.problem


@pytest.mark.process
def test_a_command_that_does_not_end_is_stopped(repository: Path) -> None:
    program = "import time; print('waiting', flush=True); time.sleep(60)"

    outcome = run_command(repository, ("-c", program), limit_s=1.0)

    assert outcome.status is None
    assert outcome.output == "waiting\n"
    assert outcome.wall_s < 20.0


def test_a_name_that_no_mutant_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token loss"]) == 2

    assert "no mutant 'token loss'; there are: token lost, " in capsys.readouterr().err
