"""What the page is told of a run directory that cannot be read, or is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from umbra.runtime.dash.run_view import RunView
from umbra.runtime.errors import ConfigError


def test_files_that_cannot_be_read_are_an_error_only_for_who_asks_for_them(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "ledger").symlink_to("ledger")
    (tmp_path / "settings.json").write_text("[]")
    view = RunView(tmp_path)

    asyncio.run(view.read_ahead())

    for reading in (view.metrics(0), view.samples("newest", None)):
        with pytest.raises(OSError, match=str(tmp_path)):
            asyncio.run(reading)
    assert '"steps": null' in asyncio.run(view.state())


def test_a_run_directory_that_was_removed_is_reported_as_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the run directory {tmp_path}/run is gone"):
        asyncio.run(RunView(tmp_path / "run").state())
