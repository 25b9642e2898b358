"""Decoder blocks through torch.compile: what is done to each number, in few passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import nn

from umbra.runtime.errors import ConfigError
from umbra.trainer.model.recomputing import decoder_blocks

_MAX_VARIANTS: Final = 32
# Of one block's code, for shapes that generated code cannot share (one row, empty blocks).


def compile_blocks(model: nn.Module) -> None:
    """Once for each block, before it is recomputed or sharded; compiled at its first pass.

    The blocks share their code, whatever the number of rows.

    Raises:
        ConfigError: it is not known what the model's blocks are.
    """
    blocks = decoder_blocks(model)
    if not blocks:
        raise ConfigError(
            f"train.compile: {type(model).__name__} does not say what its decoder blocks are "
            "(_no_split_modules); use false"
        )
    dynamo = cast(Any, torch)._dynamo
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MAX_VARIANTS)
    for block in blocks:
        any_block: Any = block
        any_block.forward = compile_function(any_block.forward)


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at its first call, for tensors of any size."""
    torch_compile: Any = cast("Any", torch).compile
    compiled: Callable[..., Any] = torch_compile(function, dynamic=True)
    return compiled
