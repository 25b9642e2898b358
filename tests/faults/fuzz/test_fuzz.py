"""`make fuzz` at reduced size, and proof that it notices what it looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from frame_mutator import PICKLE
from fuzz import Fuzz, main
from message_readers import MessageReader

from umbra.runtime.rpc.wire import CALL, RESULT
from umbra.runtime.weights.manifest import Manifest

pytestmark = [pytest.mark.process, pytest.mark.slow]

NUM_FRAMES = 100_000


def test_a_hundred_thousand_malformed_messages_do_no_harm(tmp_path: Path) -> None:
    fuzz = Fuzz(5, NUM_FRAMES, tmp_path)

    fuzz.run()

    assert fuzz.summary.frames == NUM_FRAMES
    assert fuzz.summary.frames_through_process == NUM_FRAMES // 10
    assert NUM_FRAMES // 3 < fuzz.summary.malformed < NUM_FRAMES
    assert fuzz.summary.values_read > NUM_FRAMES // 100  # some damage is harmless


def test_an_undocumented_error_ends_the_run_and_its_message_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Manifest.from_wire

    def read_if_it_is_msgpack(raw: Any) -> Manifest:
        try:
            msgpack.unpackb(raw)
        except ValueError:
            raise TypeError("planted") from None
        return read(raw)

    monkeypatch.setattr(Manifest, "from_wire", read_if_it_is_msgpack)
    with pytest.raises(TypeError, match="planted"):
        main(["--seed", "6", "--frames", "50000", "--run-dir", str(tmp_path / "run")])
    failed = tmp_path / "run" / "failed.msgpack"

    with pytest.raises(TypeError, match="planted"):
        main(["--replay", str(failed)])
    monkeypatch.undo()
    main(["--replay", str(failed)])

    assert capsys.readouterr().out.splitlines()[0] == "fuzz: seed 6"


def test_messages_are_told_apart() -> None:
    reader = MessageReader()

    assert reader.read([msgpack.packb([CALL, 1, 1, "who", [], {}, 5000, 0])])
    assert reader.read([msgpack.packb([CALL, 1, 1, "spawn", [PICKLE], {}, 5000, 0])])
    assert not reader.read([msgpack.packb([RESULT, 1, None])])
    assert not reader.read([msgpack.packb([CALL, 1, 1, "who", [], {}, 5000])])
    assert not reader.read([json.dumps([CALL]).encode()])
