"""What the adapter keeps of its core when calls fail, or are cancelled, half way."""

from __future__ import annotations

import asyncio

import pytest
from scripted_core import ScriptedCore

from umbra.engines.adapter.actor import AdapterEngine
from umbra.runtime.engine_names import ENGINE_TARGETS
from umbra.runtime.errors import ConfigError
from umbra.runtime.target import make_target


def engine_over(core: ScriptedCore) -> AdapterEngine:
    return AdapterEngine(core, max_num_seqs=4, max_context_len=64, tick_ms=1.0, load_weights=True)


def test_the_core_is_stopped_though_the_image_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError("no such descriptor")

    async def body() -> None:
        core = ScriptedCore()
        engine = engine_over(core)
        with pytest.raises(OSError, match="no such descriptor"):
            async with engine:
                monkeypatch.setattr(engine._image, "close", fail)  # pyright: ignore
        assert core.done[-1] == "stop"

    asyncio.run(body())


def test_a_start_that_is_cancelled_stops_the_core() -> None:
    async def body() -> None:
        core = ScriptedCore()
        core.may_go_on.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), engine_over(core):
                pass
        assert core.done == ["stop"]

    asyncio.run(body())


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_setting_that_an_engine_does_not_have_is_named_with_those_it_has(name: str) -> None:
    given = {"model_path": "model", "max_context_len": 64, "speed": 1}
    with pytest.raises(ConfigError, match=r"'speed'; it takes model_path, .*max_context_len"):
        make_target(ENGINE_TARGETS[name], given)
