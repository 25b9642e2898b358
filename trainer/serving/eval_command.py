"""`umbra eval`: has the rollout manager evaluate a model on held-out prompts, without a trainer, or
compares two results prompt by prompt."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
from pydantic import TypeAdapter, ValidationError

from umbra.runtime.actor.actor_spec import ActorSpec
from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.errors import ConfigError
from umbra.runtime.pools.pool_spec import PoolSpec
from umbra.runtime.rollout.manager.evaluation import compare_pairs
from umbra.runtime.rollout.prompts import PromptSet
from umbra.runtime.session.rollouts import Rollouts
from umbra.runtime.session.session import Session
from umbra.runtime.text.model_tokenizer import ModelTokenizer
from umbra.trainer.checkpoint.run_dir import RunLock
from umbra.trainer.checkpoint.trainer_state import check_complete
from umbra.trainer.config.config_file import load_config
from umbra.trainer.config.trainer_config import TrainerConfig
from umbra.trainer.data.hub_paths import with_local_paths
from umbra.trainer.data.prompt_preparation import (
    PromptFiles,
    check_held_out,
    held_out_sets,
    prepare_held_out,
)
from umbra.trainer.reporting.console import ProgressDisplay
from umbra.trainer.reporting.metrics_loggers import EvalSample
from umbra.trainer.services.chosen_settings import with_chosen_settings
from umbra.trainer.services.pool_specs import generator_spec
from umbra.trainer.services.services import (
    MANAGER,
    manager_spec,
    open_policy_tokenizer,
    prompt_budget,
    save_tokenizers,
    worker_specs,
)
from umbra.trainer.services.setup_check import check_models, check_stop_tokens
from umbra.trainer.serving.serve_command import with_pools
from umbra.trainer.serving.served_config import plan_served, pool_specs, read_serve_config
from umbra.trainer.world.run_files import check_writable, write_json


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, prints a table and writes results.json, or compares two of them; returns 0, or
    128 + signal if one ended it. Raises ConfigError or DataError for wrong settings, results or
    data, another UmbraError if engines cannot be kept running or user code failed."""
    if arguments.compare is not None:
        if arguments.config is not None or arguments.checkpoint is not None:
            raise ConfigError("--compare evaluates nothing: leave CONFIG and --checkpoint out")
        for line in _aligned(comparison(*map(Path, arguments.compare))):
            print(line)
        return 0
    if arguments.config is None:
        raise ConfigError("name the CONFIG to evaluate, or two results to --compare")
    overrides: list[str] = arguments.overrides
    config = load_config(arguments.config, overrides)
    config, chosen = with_chosen_settings(with_local_paths(config, TorchrunEnvironment.read({})))
    if chosen:
        print(chosen, file=sys.stderr)
    sets = held_out_sets(config.data, config.eval.sets)
    if not sets:
        raise ConfigError("there are no held-out prompts: set data.eval or eval.sets")
    check_models(read_serve_config(arguments.config, overrides))
    check_stop_tokens(config)
    prompt_budget(config).for_eval().check()
    check_held_out(config.data, config.eval.sets)
    checkpoint = Path(arguments.checkpoint) if arguments.checkpoint else None
    if checkpoint is not None:
        check_complete(checkpoint)
    if arguments.ema and checkpoint is None:
        raise ConfigError("--ema evaluates a checkpoint's moving average: name a --checkpoint")
    folder = config.run.dir / "eval"
    check_writable(folder)
    with RunLock(folder):
        if checkpoint is not None:
            from umbra.trainer.checkpoint.model_export import export_checkpoint  # imports torch

            export_checkpoint(config.model, checkpoint, folder / "model", is_average=arguments.ema)
            config = replace(config, model=replace(config.model, path=folder / "model"))
        tokenizer = open_policy_tokenizer(config)
        save_tokenizers(config, tokenizer, folder)
        prompts = prepare_held_out(
            config.data, sets, tokenizer, prompt_budget(config), folder=folder
        )
        overrides = [*overrides, f"model.path={config.model.path}"]
        served = read_serve_config(arguments.config, overrides)

        def engine_pools() -> list[PoolSpec]:
            plan = plan_served(served)
            for line in plan.table():
                print(line, file=sys.stderr)
            return pool_specs(served, plan)

        def work(session: Session, display: ProgressDisplay) -> None:
            rollouts = Rollouts(session, MANAGER)
            with display.activity(
                "evaluating", unit="completions", ask=rollouts.evaluation_progress
            ):
                outcome = rollouts.evaluate(
                    0, config.eval.temperature, _no_sync, config.rollout.timeout_s
                )
            for line in _table(outcome, config.eval.samples):
                print(line)
            source = checkpoint or config.model.path
            average = ", moving average" if arguments.ema else ""
            results = _results(config, tokenizer, f"{source}{average}", outcome)
            results["prompts"] = prompt_results(prompts, outcome["num_right"])
            write_json(folder / "results.json", results)
            print(f"with samples as text: {folder / 'results.json'}")

        actors = _actors(config, tokenizer, prompts, folder)
        return with_pools(engine_pools, folder, actors, work)


def _actors(
    config: TrainerConfig, tokenizer: ModelTokenizer, prompts: PromptFiles, folder: Path
) -> list[ActorSpec]:
    """Rollout workers, generators of auxiliary pools, and the rollout manager, which keeps no
    ledger: an evaluation that is started again begins from scratch."""
    stops = tokenizer.stop_token_ids(config.rollout.stop_token_ids)
    manager = manager_spec(config, prompts, stops, 1, "cpu", 1, folder)
    settings = replace(manager.kwargs["config"], ledger_path="")
    generators = [generator_spec(name, config) for name in config.pools]
    return [
        *worker_specs(config, 1, folder),
        *generators,
        replace(manager, kwargs={"config": settings}),
    ]


def _no_sync(version: int) -> None:
    raise AssertionError(f"engines that load their own weights asked for version {version}")


def _table(outcome: Mapping[str, Any], num_samples: int) -> list[str]:
    rows = dict(outcome["sets"])
    if len(rows) > 1:
        rows["all"] = outcome
    ks = [k for k in outcome["pass_at"] if k != "1"]
    mean = f"mean@{num_samples}" if num_samples > 1 else "accuracy"
    cells = [["set", "prompts", mean, "95 % interval", *(f"pass@{k}" for k in ks), "reward"]]
    for name, scores in rows.items():
        low, high = scores["accuracy_interval"]
        accuracy = [f"{scores['accuracy']:.4f}", f"[{low:.4f}, {high:.4f}]"]
        values = [*(scores["pass_at"][k] for k in ks), scores["mean_reward"]]
        row = [name, str(scores["num_prompts"]), *accuracy, *(f"{value:.4f}" for value in values)]
        cells.append(row)
    return _aligned(cells)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if idx == 0 else cell.rjust(width)
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def _results(
    config: TrainerConfig, tokenizer: ModelTokenizer, model: str, outcome: Mapping[str, Any]
) -> dict[str, Any]:
    decode = tokenizer.decode_all
    kept = ("num_prompts", "accuracy", "accuracy_interval", "pass_at", "mean_reward", "sets")
    return {
        "model": model,
        "samples_per_prompt": config.eval.samples,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "top_k": config.eval.top_k,
        "seconds": outcome["gen_s"],
        **{name: outcome[name] for name in (*kept, "completion_len_mean", "truncated_share")},
        "samples": [asdict(EvalSample.decode(decode, sample)) for sample in outcome["samples"]],
    }


class PromptResult(NamedTuple):
    data: str  # digest of the data set's columns: templates may differ, questions may not
    num_right: int


SetResults = dict[str, dict[str, PromptResult]]  # by set and id


@dataclass(frozen=True, slots=True)
class StoredResults:
    """The part of results.json that is compared."""

    samples_per_prompt: int
    prompts: SetResults


def prompt_results(files: PromptFiles, num_right: Sequence[int]) -> SetResults:
    """`num_right` [P] is in the order of `files.eval_path`, which has the prompts of every set."""
    assert files.eval_path is not None
    prompts = PromptSet.open(files.eval_path)
    found: SetResults = {}
    numbered = enumerate(num_right)
    for name, size in files.eval_sets.items():
        found[name] = {}
        for idx, number in islice(numbered, size):
            data = hashlib.sha256(msgpack.packb(prompts[idx].row)).hexdigest()[:16]
            found[name][prompts[idx].prompt_id] = PromptResult(data, number)
    prompts.close()
    return found


def comparison(path_a: Path, path_b: Path) -> list[list[str]]:
    """The cells of a table: a header, a row for each set, and one for all sets together. Raises
    ConfigError if a file has no results, or they are of other prompts or numbers of samples."""
    a, b = _read(path_a), _read(path_b)
    num_each = a.samples_per_prompt
    if num_each != b.samples_per_prompt:
        raise ConfigError(
            f"{path_a} has {num_each} completions of each prompt, {path_b} has "
            f"{b.samples_per_prompt}: evaluate both with the same eval.samples"
        )
    _check_same_prompts(path_a, a.prompts, path_b, b.prompts)
    sets = {
        name: [(row.num_right, b.prompts[name][key].num_right) for key, row in rows.items()]
        for name, rows in a.prompts.items()
    }
    if len(sets) > 1:
        sets["all"] = [pair for pairs in sets.values() for pair in pairs]
    cells = [["set", "prompts", "A", "B", "B - A", "95 % interval", "A better", "B better", "p"]]
    for name, pairs in sets.items():
        right_a, right_b = np.asarray(pairs).T
        gained, a_share, b_share = right_b - right_a, right_a / num_each, right_b / num_each
        p, (low, high) = compare_pairs(gained, num_each)
        means = [
            f"{a_share.mean():.4f}",
            f"{b_share.mean():.4f}",
            f"{gained.mean() / num_each:+.4f}",
        ]
        better = [str(np.count_nonzero(gained < 0)), str(np.count_nonzero(gained > 0))]
        row = [name, str(len(pairs)), *means, f"[{low:+.4f}, {high:+.4f}]", *better]
        cells.append([*row, f"{p:.2g}"])
    return cells


def _read(path: Path) -> StoredResults:
    """`path` may also be the `run.dir` of the evaluation."""
    path = path / "eval" / "results.json" if path.is_dir() else path
    try:
        return TypeAdapter(StoredResults).validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}: give the results.json of umbra eval, or its "
            "run.dir"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        cause = ": ".join((*map(str, first["loc"]), first["msg"]))
        raise ConfigError(f"{path} is not a results.json ({cause}): evaluate again") from error


def _check_same_prompts(path_a: Path, a: SetResults, path_b: Path, b: SetResults) -> None:
    data_a, data_b = (
        {(name, key): row.data for name, rows in results.items() for key, row in rows.items()}
        for results in (a, b)
    )
    if different := {key for key, _ in data_a.items() ^ data_b.items()}:
        first = min(different)
        where = f"is only in {path_a if first in data_a else path_b}"
        if first in data_a and first in data_b:
            where = "has other columns"
        raise ConfigError(
            f"{path_a} and {path_b} have different prompts, {len(different)} in all: "
            f"{first[1]!r} {where}; evaluate both on the same data.eval, eval.sets and "
            "data.eval_limit"
        )
