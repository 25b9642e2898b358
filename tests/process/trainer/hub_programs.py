"""Programs that take models and data sets from a hub, with an environment of their own.

python hub_programs.py paths OUT CONFIG     a rank: writes the config's local paths to OUT-RANK
python hub_programs.py engine MODEL_PATH    starts an embedded engine without weights
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.trainer.config.config_file import load_config
from umbra.trainer.data.hub_paths import with_local_paths


def paths(out: str, config_file: str) -> None:
    environment = TorchrunEnvironment.read()
    config = with_local_paths(load_config(config_file), environment)
    models = [config.model.path, config.pools["judge"].model_path, config.critic.path]
    data = [*config.data.train_files, *config.data.eval_files, config.eval.sets["more"]]
    found = [*models, *data]
    Path(f"{out}-{environment.rank}").write_text(json.dumps([str(path) for path in found]))


async def start_engine(model_path: str) -> None:
    from umbra.engines.embedded.embedded_engine import EmbeddedEngine  # imports torch

    async with EmbeddedEngine(model_path=model_path, max_context_len=16):
        print("started")


if __name__ == "__main__":
    if sys.argv[1] == "paths":
        paths(*sys.argv[2:])
    else:
        asyncio.run(start_engine(sys.argv[2]))
