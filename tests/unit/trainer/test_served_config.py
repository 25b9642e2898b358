"""What a config serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from model_folders import SPECIAL, write_model_folder

from umbra.trainer.config.config_file import check_config
from umbra.trainer.config.trainer_config import ServeConfig
from umbra.trainer.serving.openai_requests import CompletionRequest, parse_body
from umbra.trainer.serving.served_config import read_serve_config, served_pools, trained_instead
from umbra.trainer.serving.served_pool import GenerationJob, ServedPool


def test_a_trained_model_that_is_not_the_one_served_is_found(tmp_path: Path) -> None:
    start = tmp_path / "model"
    start.mkdir()
    own = [f"run.dir={tmp_path / 'run'}"]
    export = tmp_path / "run/export"

    before = trained_instead(read_serve_config(str(start), own))
    export.mkdir(parents=True)

    assert before is None
    assert trained_instead(read_serve_config(str(start), own)) == export
    assert trained_instead(read_serve_config(str(export), own)) is None


def test_engines_hold_more_completions_than_they_work_on(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    values = {"model": {"path": str(folder)}, "pool": {"max_num_seqs": 8}}
    (config,) = served_pools(check_config(ServeConfig, values, "config"))

    assert config.dispatch.max_inflight_per_engine == 10


def test_the_stops_of_rollouts_end_served_completions_too(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    rollout = {"stop": ["</a>", SPECIAL[-1]], "stop_token_ids": [9]}
    values = {"model": {"path": str(folder)}, "rollout": rollout}
    (config,) = served_pools(check_config(ServeConfig, values, "config"))
    request = parse_body({"prompt": "1", "stop": "own"}, CompletionRequest)

    async def job() -> GenerationJob:
        context: Any = SimpleNamespace(supervisor=None)
        pool = ServedPool(config, context, print)
        async with pool.text:
            return await pool.completion(request)

    sampling = asyncio.run(job()).sampling

    assert sampling.stops == ["own", "</a>", SPECIAL[-1]]
    assert {9, len(SPECIAL) - 1} <= set(sampling.options.stop_token_ids)
