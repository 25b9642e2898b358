"""Lines of a file that grows, ends in the middle of a line, and is replaced."""

from __future__ import annotations

from pathlib import Path

from umbra.runtime.dash.run_view import JsonLines


def test_lines_are_read_once_and_from_the_beginning_if_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, ("step",))
    lines.read_on()
    assert lines.rows == []

    path.write_text('{"step": 1}\n{"step": 2, "loss": NaN}\n{"st')
    lines.read_on()
    assert lines.rows == [{"step": 1}, {"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\nnot JSON\n[4]\n')
    lines.read_on()
    lines.read_on()
    assert lines.encoded == ['{"step": 1}', '{"step": 2, "loss": null}', '{"step": 3}']
    assert lines.times_replaced == 0

    (tmp_path / "new").write_text('{"step": 1}\n{"step": 2}\n{"step": 5}\n{"step": 6}\n')
    (tmp_path / "new").replace(path)
    lines.read_on()
    assert [row["step"] for row in lines.rows] == [1, 2, 5, 6]
    assert lines.times_replaced == 1
