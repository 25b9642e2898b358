"""Puts local paths in the place of hub names in a config, before anything reads them.

    rank 0                    downloads ─▶ paths ─▶ the ranks' store ─┐
    local rank 0 of others    download the same commits ─▶ store ─────┤
    all ranks                 wait for all nodes, and take the paths of their own

Local paths that exist are used as they are. Without hub names, nothing is imported or waited for.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from umbra.runtime.cluster.environment import TorchrunEnvironment
from umbra.runtime.cluster.job_nodes import Store, open_job_store
from umbra.runtime.disk import replacing, similar_path
from umbra.runtime.engine_api.weight_files import download_model, local_model, not_downloaded
from umbra.runtime.errors import DataError, JobFailed, UmbraError, how_to_install
from umbra.trainer.config.trainer_config import ServeConfig, TrainerConfig
from umbra.trainer.data.data_rows import SUFFIXES

_LIMIT_S: Final = 6 * 3600.0
"""For a node's downloads. A shorter time ends jobs with large models and slow networks; a longer
one delays the end of a job whose node hangs."""

# Names of models and data sets on the hub, see `HubName`.
_REPO: Final = r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w.-]+))?"
_MODEL: Final = re.compile(_REPO)
_DATA: Final = re.compile(_REPO + r"(/(?P<subset>[\w.-]+))?(:(?P<split>[\w\[\]:%+-]+))?")

_Config = TypeVar("_Config", TrainerConfig, ServeConfig)


def with_local_models(config: _Config) -> _Config:
    """Downloads the models that a config names, into this machine's cache. Raises DataError if one
    is neither there nor on the hub, or the hub cannot be reached."""
    return _replaced(config, {key: _model(key, name) for key, name in _models(config).items()})


def with_local_paths(config: TrainerConfig, environment: TorchrunEnvironment) -> TrainerConfig:
    """Downloads models and data sets, once on each node. Every rank calls it. Raises like
    `with_local_models`, and JobFailed if a node does not finish in time."""
    if not (_models(config) or _data(config)):
        return config
    if environment.world_size == 1:
        return _replaced(config, _download(config, {}))
    # torchrun's store lives on when it restarts the ranks.
    start = "" if environment.has_own_store else environment.incarnation
    keys = [f"hub-{start}-{node}" for node in range(environment.num_nodes)]
    store, mine = open_job_store(environment, _LIMIT_S), keys[environment.node_rank]
    if environment.local_rank == 0:
        first = {} if environment.node_rank == 0 else _await(store, keys[0])
        store.set(mine, _outcome(lambda: _download(config, first)))
    paths = {key: _await(store, key) for key in keys}
    return _replaced(config, {key: Path(path) for key, path in paths[mine].items()})


def _outcome(download: Callable[[], Mapping[str, Path]]) -> str:
    try:
        return json.dumps({"paths": {key: str(path) for key, path in download().items()}})
    except UmbraError as error:
        return json.dumps({"error": str(error)})


def _await(store: Store, key: str) -> dict[str, str]:
    try:
        outcome: dict[str, Any] = json.loads(store.get(key))
    except RuntimeError as error:  # torch.distributed.DistError
        raise JobFailed(
            f"node {key.rpartition('-')[2]} did not report its downloads from the hub: see the "
            f"output there ({str(error).splitlines()[0]})"
        ) from error
    if "error" in outcome:
        raise DataError(outcome["error"])
    return outcome["paths"]


def _download(config: TrainerConfig, first: Mapping[str, str]) -> dict[str, Path]:
    """Local paths by setting. `first`, empty on the first node itself, has its paths,
    which name commits."""
    paths: dict[str, Path] = {}
    for key, name in _models(config).items():
        paths[key] = (
            Path(local_model(first[key], with_weights=True)) if first else _model(key, name)
        )
    for key, name in _data(config).items():
        try:
            paths[key] = download_data(name)
        except DataError as error:
            raise DataError(
                f"{key}: there is no such file, and {error}, or {key} to a file"
            ) from error
    return paths


def _model(key: str, name: HubName) -> Path:
    try:
        return download_model(name.repo, name.revision, with_weights=True)
    except DataError as error:
        raise DataError(
            f"{key}: {_not_here(Path(name.repo))}, and {error}, or {key} to a local directory"
        ) from error


def _not_here(path: Path) -> str:
    text, folder = f"no directory {path.absolute()}", path.parent
    if not folder.is_dir():
        return text
    return f"{text} (there is {folder.absolute()}{similar_path(path)})"


def hub_settings(config: TrainerConfig) -> list[str]:
    return [*_models(config), *_data(config)]


def _models(config: TrainerConfig | ServeConfig) -> dict[str, HubName]:
    paths = {"model.path": config.model.path}
    if config.critic is not None and config.critic.path is not None:
        paths["critic.path"] = config.critic.path
    paths |= {f"pools.{name}.model_path": pool.model_path for name, pool in config.pools.items()}
    return {key: name for key, path in paths.items() if (name := model_name(path))}


def _data(config: TrainerConfig) -> dict[str, HubName]:
    files = _keys("data.train", config.data.train), _keys("data.eval", config.data.eval)
    names = {
        key: data_name(path, split)
        for paths, split in zip(files, ("train", "test"), strict=True)
        for key, path in paths.items()
    }
    for each, path in config.eval.sets.items():
        names[f"eval.sets.{each}"] = data_name(path, "test")
    return {key: name for key, name in names.items() if name}


def _keys(key: str, paths: Path | tuple[Path, ...] | None) -> dict[str, Path]:
    """The paths of a setting by its key, or by key and index if there is a list."""
    if isinstance(paths, tuple):
        return {f"{key}[{idx}]": path for idx, path in enumerate(paths)}
    return {} if paths is None else {key: paths}


def _local(key: str, given: Path | tuple[Path, ...] | None, paths: Mapping[str, Path]) -> Any:
    found = [paths.get(each, path) for each, path in _keys(key, given).items()]
    return tuple(found) if isinstance(given, tuple) else next(iter(found), None)


def _replaced(config: _Config, paths: Mapping[str, Path]) -> _Config:
    if not paths:
        return config
    model = replace(config.model, path=paths.get("model.path", config.model.path))
    pools = {
        name: replace(pool, model_path=paths.get(f"pools.{name}.model_path", pool.model_path))
        for name, pool in config.pools.items()
    }
    held_out = {
        name: paths.get(f"eval.sets.{name}", path) for name, path in config.eval.sets.items()
    }
    data = config.data
    if data is not None:
        local = {
            name: _local(f"data.{name}", given, paths)
            for name, given in (("train", data.train), ("eval", data.eval))
        }
        data = replace(data, **local)
    evaluation = replace(config.eval, sets=held_out)
    changed: Any = {"model": model, "pools": pools, "eval": evaluation, "data": data}
    if config.critic is not None and "critic.path" in paths:
        changed["critic"] = replace(config.critic, path=paths["critic.path"])
    return replace(config, **changed)


def download_data(name: HubName) -> Path:
    """The rows of a split, beside the files that `datasets` has in its cache. Only the process that
    downloads imports `datasets`, which takes seconds. Raises DataError if the data set is neither
    in the cache nor on the hub, or has no such split."""
    try:
        datasets: Any = importlib.import_module("datasets")
        locks: Any = importlib.import_module("filelock")
    except ImportError:
        raise DataError(
            f"the data set {name.repo!r} of the hub needs datasets: {how_to_install('hub')}"
        ) from None
    try:
        rows = datasets.load_dataset(
            name.repo, name.subset or None, split=name.split, revision=name.revision
        )
        folder = Path(rows.cache_files[0]["filename"]).parent  # of this commit and configuration
        path = folder / f"umbra-{quote(name.split, safe='')}.parquet"
        with locks.FileLock(f"{path}.lock"):
            if not path.exists():
                with replacing(path) as file:
                    rows.to_parquet(file)
    except Exception as error:  # it reads formats of all kinds
        raise not_downloaded(f"the data set {name.repo!r}, split {name.split!r},", error) from error
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A name on the hub.

    Qwen/Qwen3-0.6B         the newest commit         openai/gsm8k/main         a configuration
    Qwen/Qwen3-0.6B@v1.0    a branch, tag or commit   openai/gsm8k/main:test    and a split
    """

    repo: str
    revision: str | None
    subset: str = ""  # of a data set; the hub says configuration; "": its only one
    split: str = ""  # of a data set


def model_name(path: Path) -> HubName | None:
    """None if `path` exists or is no name."""
    found = _MODEL.fullmatch(str(path))
    if found is None or path.exists():
        return None
    return HubName(repo=found["repo"], revision=found["revision"])


def data_name(path: Path, default_split: str) -> HubName | None:
    """None if `path` exists or is no name."""
    found = _DATA.fullmatch(str(path))
    if found is None or path.suffix in SUFFIXES or path.exists():
        return None
    return HubName(
        repo=found["repo"],
        revision=found["revision"],
        subset=found["subset"] or "",
        split=found["split"] or default_split,
    )
