"""Imports what training imports: for the fork server of `preloaded_python`, before it forks."""

import gc
import importlib
import sys

for module in (
    "matplotlib.backends.backend_agg",
    "pydantic.type_adapter",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.utils.tensorboard",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_tokenizers",
    "umbra.trainer.command_line",
    "umbra.trainer.reporting.metrics_plot",
    "umbra.trainer.train",
):
    importlib.import_module(module)

SYSTEM_PATH = tuple(sys.path[1:])

gc.freeze()  # so that no fork's garbage collection copies pages
