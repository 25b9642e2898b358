"""The reward function in docs/engines.md asks a judge, and reads its answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from documented_examples import files_of

from umbra.runtime.testing.scripted_agents import ScriptedContext


def test_the_judge_grades_each_completion(tmp_path: Path) -> None:
    shown: dict[str, Any] = {}
    exec(files_of("engines.md")["graded.py"], shown)
    context = ScriptedContext({"prompt": "2 + 2"}, answers=[], pools={"judge": ["7", "none"]})

    rewards = asyncio.run(shown["graded"](["2 + 2", "2 + 2"], ["4", "5"], context))

    assert rewards == [7.0, 0.0]
