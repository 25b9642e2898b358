"""Decoder blocks with other forward passes: compiled with torch.compile, which saves passes over
memory, or computed again in the backward pass, which saves memory."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from umbra.runtime.errors import ConfigError

_MAX_VARIANTS: Final = 32
"""Compiled variants of one block, for shapes that cannot share code (one row, empty blocks)."""
_CACHE: Final = Path("~/.cache/umbra/compiled")
"""Where torch keeps compiled code for later runs, unless TORCHINDUCTOR_CACHE_DIR is set, or nothing
can be written there. Its own default is in /tmp, which containers lose."""
_FUNCTION_OPTIONS: Final = (
    # By default torch traces blocks with an autograd function (`KeyRows`) again in each run.
    "autograd_cache_allow_custom_autograd_functions",
    # By default a backward pass that cannot be compiled fails when it runs, too late for another.
    "force_non_lazy_backward_lowering",
)

logger = logging.getLogger(__name__)


def compile_blocks(model: nn.Module) -> None:
    """Must be called once, before blocks are recomputed or sharded. Blocks compile at the
    first pass and share code for any number of rows."""
    blocks = decoder_blocks(model)
    if not blocks:
        logger.warning(
            "train.compile: %s does not declare its decoder blocks (_no_split_modules), so only "
            "log-probabilities are compiled",
            type(model).__name__,
        )
    dynamo = cast(Any, torch)._dynamo
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MAX_VARIANTS)
    for block in blocks:
        any_block: Any = block
        any_block.forward = compile_with_constants(any_block.forward)


def compile_with_constants(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function whose numbers stay the same. By default torch makes them inputs, finds
    that some cannot be, and compiles all of it a second time. No cache keeps the first attempt."""
    constant_numbers = cast("Any", torch)._dynamo.config.patch(specialize_float=True)
    return constant_numbers(CompiledFunction(function))


class CompiledFunction:
    """A function that is compiled at its first call, for tensors of any size. If one cannot be
    compiled, a warning says why, and all run uncompiled from then on."""

    _is_possible: ClassVar[bool] = True

    def __init__(self, function: Callable[..., Any]) -> None:
        _set_options()
        torch_compile: Any = cast("Any", torch).compile
        self._function = function
        self._compiled: Callable[..., Any] = torch_compile(function, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not CompiledFunction._is_possible:
            return self._function(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except (RuntimeError, OSError) as error:
            known = (OSError, cast("Any", torch)._dynamo.exc.TorchDynamoException)  # a full disk
            if not isinstance(error, known):
                raise
            CompiledFunction._is_possible = False
            reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
            logger.warning("train.compile: torch cannot compile, so nothing is: %s", reason)
        return self._function(*args, **kwargs)


def _set_options() -> None:
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        folder = _CACHE.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    functions = cast("Any", torch)._functorch.config
    for option in _FUNCTION_OPTIONS:
        if hasattr(functions, option):
            setattr(functions, option, True)


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, by the class names that the model declares."""
    names = cast("set[str]", set(getattr(model, "_no_split_modules", None) or ()))
    return [module for module in model.modules() if type(module).__name__ in names]


def recompute_blocks(model: nn.Module) -> None:
    """Makes blocks keep only their inputs, and compute the rest again in the backward pass. Must be
    called once, before blocks are sharded: gathering parameters is not recomputed.
    Raises ConfigError if the model does not declare its blocks."""
    blocks = decoder_blocks(model)
    if not blocks:
        raise ConfigError(
            f"train.activation_checkpointing: {type(model).__name__} does not declare its decoder "
            "blocks (_no_split_modules); use 'none'"
        )
    for block in blocks:
        _recompute(block)


def _recompute(block: Any) -> None:
    untyped: Any = checkpointing
    forward, run_again = block.forward, untyped.checkpoint

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # There is no dropout: models are in evaluation mode.
        options = {"use_reentrant": False, "preserve_rng_state": False}
        return run_again(forward, *args, **options, **kwargs)

    block.forward = recomputing
