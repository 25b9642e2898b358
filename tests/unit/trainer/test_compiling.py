"""What torch.compile makes of decoder blocks, and what happens where it cannot."""

from __future__ import annotations

import logging
import os
import pwd
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import lowering as inductor_lowering
from training_models import make_model

from umbra.trainer.config.trainer_config import TrainSection
from umbra.trainer.model.compiling import CompiledFunction, compile_blocks
from umbra.trainer.model.optimizer import ModelOptimizer
from umbra.trainer.model.packing import KeyRows

library: Any = torch
inductor: Any = inductor_config
pytestmark = pytest.mark.filterwarnings("default")  # torch warns while it compiles


@pytest.fixture(autouse=True)
def compiles_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CompiledFunction, "_is_possible", True)


def logits_of(model: Any, num_tokens: int) -> Tensor:
    return model(torch.arange(2, 2 + num_tokens)[None], use_cache=False).logits


@pytest.mark.slow
def test_all_layers_and_lengths_share_a_compiled_block(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = library._dynamo.utils.counters["stats"]
    monkeypatch.setattr(torch, "compile", partial(library.compile, backend="eager"))  # in seconds
    model, compiled = make_model(num_hidden_layers=4), make_model(num_hidden_layers=4)
    before = counters["unique_graphs"]
    compile_blocks(compiled)

    for num_tokens in (9, 5, 14):
        torch.testing.assert_close(logits_of(compiled, num_tokens), logits_of(model, num_tokens))

    assert counters["unique_graphs"] - before == 1


@pytest.mark.slow
def test_code_with_an_autograd_function_is_kept_for_later_runs() -> None:
    counters = library._dynamo.utils.counters["aot_autograd"]
    keys = KeyRows.invert(np.array([0, 1, 0, 1, 2, 0, 1, 3]), 2, 4, torch.device("cpu"))
    rows = torch.randn(4, 6, requires_grad=True)
    counters.clear()

    with inductor.patch(compile_threads=1):  # no worker processes
        gathered = CompiledFunction(keys.gather)(rows)

    torch.testing.assert_close(gathered, keys.gather(rows))
    assert (counters["autograd_cache_bypass"], counters["autograd_cache_miss"]) == (0, 1)


def after_8_bit_steps(shares: Sequence[slice], *, compiles: bool) -> dict[str, Tensor]:
    """Parameters and codes after three steps of optimizers that have these shares of all rows."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for share in shares:
        generator = torch.Generator().manual_seed(0)
        whole = {f"{n} rows": torch.randn(n, 3, 512, generator=generator) for n in (8, 6, 43)}
        parameters = {name: nn.Parameter(value[share].clone()) for name, value in whole.items()}
        train = TrainSection(steps=3, optimizer="adamw_8bit", compile=compiles, max_grad_norm=0.0)
        optimizer = ModelOptimizer(parameters, dict.fromkeys(parameters, "hidden"), train)
        for step in range(3):
            for parameter in parameters.values():
                parameter.grad = (parameter.detach() * 7 * (step + 1)).sin()
            optimizer.step(step)
        for name, value in {**parameters, **optimizer.states}.items():
            found[name].append(value.detach())
    return {name: torch.cat(values) for name, values in found.items() if values[0].ndim}


@pytest.mark.slow
def test_8_bit_steps_of_all_shapes_share_code_that_rounds_as_on_other_ranks() -> None:
    counters = library._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]

    with inductor.patch(compile_threads=1):
        whole = after_8_bit_steps([slice(None)], compiles=True)
        parts = after_8_bit_steps([slice(4), slice(4, None)], compiles=True)

    assert counters["unique_graphs"] - before == 1
    for name, eager in after_8_bit_steps([slice(None)], compiles=False).items():
        assert torch.equal(whole[name], parts[name]), name
        if eager.dtype == torch.uint8:  # a value's last bit may decide between two levels
            assert (whole[name].int() - eager.int()).abs().max() <= 1, name
            assert (whole[name] != eager).float().mean() < 1e-3, name
        else:
            torch.testing.assert_close(whole[name], eager)


def twice(values: Tensor) -> Tensor:
    return values * 2 + 1


@pytest.mark.slow
def test_without_a_compiler_all_runs_uncompiled_and_one_warning_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = torch.arange(64.0).reshape(8, 8)
    functions = [CompiledFunction(twice), CompiledFunction(torch.sin)]

    no_compiler = inductor.patch({"cpp.cxx": ("/nonexistent/g++",), "compile_threads": 1})
    with no_compiler, caplog.at_level(logging.WARNING, logger="umbra"):
        results = [function(values) for function in functions for _ in range(2)]

    torch.testing.assert_close(results, [twice(values)] * 2 + [values.sin()] * 2)
    (record,) = caplog.records
    assert "torch cannot compile, so nothing is: InvalidCxxCompiler" in record.getMessage()


@pytest.mark.slow
def test_a_backward_pass_that_cannot_be_compiled_runs_uncompiled_with_its_forward_pass(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no code for cos")

    monkeypatch.setitem(inductor_lowering.lowerings, library.ops.aten.cos.default, fail)
    values = torch.arange(64.0).reshape(8, 8).requires_grad_()

    with inductor.patch(compile_threads=1), caplog.at_level(logging.WARNING, logger="umbra"):
        CompiledFunction(torch.sin)(values).sum().backward()

    torch.testing.assert_close(values.grad, values.detach().cos())
    (record,) = [each for each in caplog.records if each.name.startswith("umbra")]
    assert "torch cannot compile, so nothing is: " in record.getMessage()


def not_compiled(function: Any, *, dynamic: bool) -> Any:
    return function


def has_no_entry(uid: int) -> None:
    raise KeyError(uid)


@pytest.mark.parametrize("home", ["/proc", None])
def test_without_a_home_to_write_to_torch_keeps_code_where_it_does(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(torch, "compile", not_compiled)
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    else:
        monkeypatch.setenv("HOME", home)

    assert CompiledFunction(twice)(torch.ones(1)) == 3
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_model_without_known_blocks_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    compile_blocks(nn.Linear(2, 2))

    assert "Linear does not declare its decoder blocks" in caplog.text
