"""The example in docs/agents.md passes its own tests, and trains."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documented_examples import files_of
from small_quickstart import write_assets

from umbra.runtime.dash.sample_texts import open_ledger
from umbra.runtime.rollout.ledger.sample_accounts import SampleState

FILES = files_of("agents.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that the document shows."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_example_has_all_its_files() -> None:
    assert sorted(FILES) == ["agent.toml", "second_try.py", "test_second_try.py"]


def test_the_examples_own_tests_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    shown: dict[str, Any] = runpy.run_path(str(folder / "test_second_try.py"))
    tests = [value for name, value in shown.items() if name.startswith("test_")]

    assert len(tests) == 2
    for test in tests:
        test()
    del sys.modules["second_try"]


@pytest.mark.slow
@pytest.mark.process
def test_the_example_trains(folder: Path) -> None:
    write_assets(folder / "runs" / "quickstart-assets")

    subprocess.run(
        [sys.executable, "-m", "umbra.trainer", "agent.toml", "train.steps=2"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=150,
        check=True,
        capture_output=True,
    )

    index = open_ledger(folder / "runs" / "agent")
    assert index.table.counts[SampleState.TRAINED] == 2 * 32 * 8
    assert index.table.totals.given_tokens > 0
    assert index.table.totals.resets == 0
    rewards = {row.reward for row in index.newest(None)[0]}
    assert rewards <= {0.0, 0.1, 0.5, 1.0}
