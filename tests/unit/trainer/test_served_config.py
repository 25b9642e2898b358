"""What a config serves."""

from __future__ import annotations

from pathlib import Path

from umbra.trainer.serving.served_config import read_serve_config, trained_instead


def test_a_trained_model_that_is_not_the_one_served_is_found(tmp_path: Path) -> None:
    start = tmp_path / "model"
    start.mkdir()
    own = [f"run.dir={tmp_path / 'run'}"]
    export = tmp_path / "run/export"

    before = trained_instead(read_serve_config(str(start), own))
    export.mkdir(parents=True)

    assert before is None
    assert trained_instead(read_serve_config(str(start), own)) == export
    assert trained_instead(read_serve_config(str(export), own)) is None
