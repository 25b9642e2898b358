"""Imports what training imports: for the fork server of `preloaded_python`, before it forks."""

import gc
import importlib
import os
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

_ADDED = os.environ["PYTHONPATH"].split(os.pathsep)
SYSTEM_PATH = tuple(path for path in sys.path[1:] if path not in _ADDED)
"""`sys.path` of a Python without PYTHONPATH."""

gc.freeze()  # so that no fork's garbage collection copies pages
