"""What share of the weights changes from one step of training to the next, in bfloat16.

The quickstart's model (0.22 M parameters, float32) is trained by two ranks with a constant learning
rate and the default AdamW, with a checkpoint after each step. Counted are the elements whose
bfloat16, which is what engines get, has other bits than a step before. Printed is the median over
the steps, and the smallest and largest share.

    python tests/bench/changed_values.py [--learning-rate 1e-6 1e-5] [--steps 30] [--json]
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast

import torch
from bench_hardware import describe_hardware
from bench_options import positive
from bench_programs import BenchError
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

_CONFIG: Final = Path(__file__).parents[2] / "launch" / "configs" / "quickstart.toml"
_TRAIN_LIMIT_S: Final = 900.0
_MODEL: Final = "model."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="umbra-bench-") as name:
        folder = Path(name)
        _run("umbra.trainer.quickstart", str(folder / "assets"))
        changed = {rate: _changed(folder, rate, given.steps) for rate in given.learning_rate}
    summaries = {f"{rate:g}": _summary(shares) for rate, shares in changed.items()}
    facts = {
        "bench": "changed_values",
        "hardware": describe_hardware(),
        "versions": {"torch": torch.__version__},
        "steps": given.steps,
        "changed": summaries,
    }
    if given.json:
        print(json.dumps(facts))
    else:
        for rate, summary in summaries.items():
            print(f"learning rate {rate}: {summary}")
    return 0


def _summary(shares: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(shares), "least": min(shares), "most": max(shares)}
    return {key: round(share, 4) for key, share in found.items()}


def _changed(folder: Path, learning_rate: float, steps: int) -> list[float]:
    """The share that each step but the first one changes."""
    run_dir = folder / f"run-{learning_rate:g}"
    assets = folder / "assets"
    _run(
        *("torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", "-m", "umbra.trainer", str(_CONFIG)),
        f"run.dir={run_dir}",
        f"model.path={assets / 'model'}",
        f"data.train={assets / 'train.jsonl'}",
        f"data.eval={assets / 'eval.jsonl'}",
        f"train.learning_rate={learning_rate}",
        "train.schedule=constant",
        "train.warmup_steps=0",
        "train.betas=[0.9, 0.999]",
        f"train.steps={steps}",
        "train.eval_every=0",
        "train.checkpoint_every=1",
        f"train.keep_checkpoints={steps}",
    )
    versions = [_weights(path) for path in sorted((run_dir / "checkpoints").iterdir())]
    return [(one != other).float().mean().item() for one, other in pairwise(versions)]


def _weights(checkpoint: Path) -> Tensor:
    """The bits of all parameters in bfloat16: [parameters] int16."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(checkpoint, file.name)
        state: dict[str, Any] = torch.load(file.name, weights_only=False)
    parts = [value for name, value in sorted(_flat(state).items()) if name.startswith(_MODEL)]
    return torch.cat([part.flatten().bfloat16().view(torch.int16) for part in parts])


def _flat(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            found[prefix + name] = value
    return found


def _run(*module: str) -> None:
    command = [sys.executable, "-m", *module]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=_TRAIN_LIMIT_S, check=False)
    if ended.returncode:
        raise BenchError(f"{module[0]}: status {ended.returncode}; its error is above")


if __name__ == "__main__":
    sys.exit(main())
